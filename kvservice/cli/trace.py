"""Request traces: JSON lines with the prefix-chained block hashes of each request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HASH_ID_LIMIT = 1 << 63


class TraceError(Exception):
    """The trace cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. hash_ids: one id per block of tokens, root first."""

    hash_ids: tuple[int, ...]


def read_trace(path: Path, *, limit_count: int | None) -> Iterator[TraceRequest]:
    """Yield the requests of a trace in its order, at most `limit_count`.

    Raises:
        TraceError: a line is no request; nothing after it is read.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if limit_count is not None and number > limit_count:
                    return
                yield _parse(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}") from error


def _parse(line: str, place: str) -> TraceRequest:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers and nesting that Python refuses
        raise TraceError(f"{place}: not a JSON object: {error}") from error
    ids = record.get("hash_ids") if isinstance(record, dict) else None
    if not isinstance(ids, list):
        raise TraceError(f"{place}: field hash_ids is missing; each line is an object with a list of ids")
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < HASH_ID_LIMIT:
            raise TraceError(f"{place}: hash_ids holds {value!r}; ids are integers from 0 to 2**63 - 1")
    # An id may stand once in a request: a chain never comes back to a block.
    return TraceRequest(tuple(dict.fromkeys(ids)))
