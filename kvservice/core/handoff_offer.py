"""What an offer must hold to, before anything of it is recorded."""

from __future__ import annotations

import numpy as np

from kvservice.core.books import Books
from kvservice.core.engine_memory import KnownLayout
from kvservice.core.errors import (
    BlockSizeError,
    DrainingError,
    DuplicateKeyError,
    InvalidFieldError,
    LimitReachedError,
    RequestIdReusedError,
    SegmentUnknownError,
)
from kvservice.core.events import Offer
from kvservice.core.limits import RETRY_AFTER_MS
from kvservice.core.namespace import Space
from kvservice.core.records import Handoff, Session
from kvservice.core.row_table import KEY_BYTES

REQUEST_ID_BYTES = 16


def find_repeated(books: Books, session: Session, event: Offer) -> Handoff | None:
    """Return the handoff that the same request made before.

    Raises:
        RequestIdReusedError: it was another request.
    """
    if len(event.request_id) != REQUEST_ID_BYTES:
        raise InvalidFieldError(
            f"request_id has {len(event.request_id)} bytes; it takes {REQUEST_ID_BYTES}, "
            "drawn anew for each offer"
        )
    number = books.handoff_requests.get((session.engine, event.request_id))
    if number is None:
        return None
    found = books.handoffs[number]
    if not _is_same(found, event):
        raise RequestIdReusedError(
            f"request_id {event.request_id.hex()} offered other blocks before; draw another"
        )
    return found


def check_offer(books: Books, session: Session, event: Offer) -> tuple[list[Space], tuple[KnownLayout, ...]]:
    """Return the spaces and layouts of an offer that may be recorded.

    Raises:
        KvError: it may not, and why.
    """
    if books.is_draining:
        raise DrainingError("the daemon is stopping and takes no offers", retry_after_ms=1000)
    spaces = books.opened(session, event.spaces)
    count = books.keys_count(event.keys)
    keys = {event.keys[start : start + KEY_BYTES] for start in range(0, len(event.keys), KEY_BYTES)}
    if len(keys) != count:
        raise DuplicateKeyError(f"keys names {count - len(keys)} keys twice; offer each once")
    if len(session.offered) >= books.limits.max_handoffs:
        raise LimitReachedError(
            f"the session has {len(session.offered)} handoffs on offer, which is the limit "
            "(limits.max_handoffs)",
            retry_after_ms=RETRY_AFTER_MS,
        )
    layouts = _layouts(books, session, event, spaces)
    slots_count = count * len(spaces)
    for name, given, expected in (
        ("blocks", len(event.blocks), slots_count if layouts else 0),
        ("checksums", len(event.checksums), slots_count if len(event.checksums) else 0),
    ):
        if given != expected:
            raise InvalidFieldError(
                f"{name} has {given} entries; {count} keys in {len(spaces)} spaces take {expected}"
            )
    for part, layout in enumerate(layouts):
        highest = int(event.blocks[part :: len(spaces)].max())
        if highest >= layout.layout.blocks_count:
            raise InvalidFieldError(
                f"blocks names block {highest} of layout {layout.layout_id}, "
                f"which has {layout.layout.blocks_count}"
            )
    return spaces, layouts


def _is_same(found: Handoff, event: Offer) -> bool:
    """Say whether an offer is of what was offered before: the same bytes, allowed to go the same ways."""
    # What goes through the arena may have outlived its layouts; the blocks in them are still known.
    layout_ids = tuple(layout.layout_id for layout in found.layouts) or event.layout_ids
    return (
        (found.spaces, found.keys, found.policy, layout_ids)
        == (event.spaces, event.keys, event.policy, event.layout_ids)
        and np.array_equal(found.blocks, event.blocks)
        and np.array_equal(found.checksums, event.checksums)
    )


def _layouts(books: Books, session: Session, event: Offer, spaces: list[Space]) -> tuple[KnownLayout, ...]:
    if event.layout_ids and len(event.layout_ids) != len(spaces):
        raise InvalidFieldError(
            f"layout_ids has {len(event.layout_ids)} entries for {len(spaces)} spaces; "
            "give one for each, or none"
        )
    found: list[KnownLayout] = []
    for layout_id, space in zip(event.layout_ids, spaces, strict=False):
        layout = books.layouts.get(layout_id)
        owner = None if layout is None else books.sessions.get(layout.token)
        if layout is None or owner is None or owner.engine != session.engine:
            raise SegmentUnknownError(
                f"layout_ids names {layout_id}, which no process of this engine has registered; "
                "register its segments first"
            )
        if layout.layout.block_bytes != space.block_bytes:
            raise BlockSizeError(
                f"a block of layout {layout_id} has {layout.layout.block_bytes} bytes, "
                f"one of space {space.id} has {space.block_bytes}"
            )
        found.append(layout)
    return tuple(found)
