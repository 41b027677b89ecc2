"""One-sided transfers over UCX: the thin binding that the ucx transport stands on.

Load a library once (`load`), open a `Worker`, register memory, and give its address and
the registration's remote key to the peer. The peer connects, attaches the key, and gets
or puts in batches, each of them one C call without the GIL.

What a caller must know:

- **Trust.** A remote key protects nothing: whoever may connect may read and write any
  mapped memory of this process over TCP and CMA, and a wild address can crash it. Every
  remote range is therefore compared with its segment before it is posted, and UCX is for
  peers that are trusted. The envelopes around addresses and keys stop accidents only.
- **Two endpoints for each peer.** A watched endpoint tells a lost peer and can be cut off,
  but UCX does not choose CMA for it; one that is not watched may use CMA and never learns
  that the peer is gone. Data goes over the second, and the first stands by: `watched=`.
  CMA reaches a process by its number alone, so an endpoint must not be used once its
  watched partner has failed: the number may be another process's by then.
- **Connections.** Closing a watched endpoint leaves its TCP connection behind until one of
  the two workers is closed, so whoever reconnects for ever should renew its worker too.
- **Memory.** Registered and local memory stay the caller's, mapped until the registration
  is closed and the transfer has returned. `transfer` returns when no operation can touch
  local memory any more; where that cannot be had it raises `UnsettledError`, the worker is
  poisoned, and the memory must stay until the worker is closed.
- **Progress.** TCP needs the target to make progress (`serve`, on a thread of its own); CMA
  does not, once the endpoint is wired up. Wiring up needs both sides, unless all that
  UCX may choose is shared memory. A failure is only told while this side makes progress.
- **Processes.** What was opened before a fork belongs to the parent; a child that uses it
  gets `UcxError`. Start children by exec.
- **Settings** go into `Worker` by name, without the prefix UCX_. The environment is not
  changed. UCX reads the operator's UCX_* variables and its configuration file itself, and
  what `Worker` is given stands above those. `CMA_SETTINGS` are worth giving where CMA may
  be chosen. UCX before 1.14 does not use CMA for this, and only warns of unknown settings.
- **Words.** UCX's log lines are kept in memory (`drain_log`), so nothing is printed, except
  what an operator's UCX_LOG_LEVEL makes UCX say before it is loaded. That is for the whole
  process: another user of the same library file finds its lines there. Signal handlers
  stay as they were, whatever UCX_HANDLE_ERRORS asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from kvservice.native.ucx.failures import UcxError, UcxUnavailableError, UnsettledError
from kvservice.native.ucx.library import find_library

try:
    from kvservice.native.ucx import _ucx
    from kvservice.native.ucx._ucx import (
        LOG_LINES,
        STATUS_NOT_POSTED,
        STATUS_OUTSIDE,
        STATUS_UNCONFIRMED,
        STATUS_UNSETTLED,
        WINDOW_MAX,
        Endpoint,
        Registration,
        RemoteSegment,
        Worker,
        drain_log,
        library_path,
        library_version,
        status_text,
    )

    _REASON = ""
except ImportError as missing:
    _REASON = (
        "the UCX extension is not there (UCX's headers and a compiler are needed when kvservice is "
        f"installed; the package libucx-cu12 has them): {missing}"
    )

__all__ = [
    "CMA_SETTINGS",
    "LOG_LINES",
    "STATUS_NOT_POSTED",
    "STATUS_OUTSIDE",
    "STATUS_UNCONFIRMED",
    "STATUS_UNSETTLED",
    "WINDOW_MAX",
    "Endpoint",
    "Outcome",
    "Registration",
    "RemoteSegment",
    "UcxError",
    "UcxUnavailableError",
    "UnsettledError",
    "Worker",
    "drain_log",
    "find_library",
    "is_available",
    "library_path",
    "library_version",
    "load",
    "status_text",
    "why_not",
]


CMA_SETTINGS: Mapping[str, str] = MappingProxyType({"CMA_SEG_SIZE": "2m", "CMA_TX_QUOTA": "8"})
"""How much CMA copies in one step of progress: UCX's own 512 KiB and 1 cost up to a tenth of the speed of
bare process_vm_readv. More would hold the worker, and a deadline, for longer than some milliseconds."""


class Outcome(IntEnum):
    """Why a transfer ended; `statuses` says what became of each operation."""

    DONE = 0
    """Every operation has status 0; the bytes of a put are in the peer's memory."""
    FAILED = 1
    """An operation failed, or was outside its segment."""
    DEADLINE = 2
    """The deadline passed first."""
    LOST = 3
    """An endpoint failed or was cut off, the watched one perhaps."""
    CLOSED = 4
    """The endpoint or the worker was closed meanwhile."""


def why_not(choice: str = "auto") -> str:
    """Say why UCX cannot be used here; empty where the extension is built and a library may be there.

    Only `load` tells whether the system's library is.
    """
    if _REASON:
        return _REASON
    try:
        find_library(choice)
    except UcxUnavailableError as missing:
        return str(missing)
    return ""


def is_available(choice: str = "auto") -> bool:
    """Tell whether `load` is worth trying."""
    return not why_not(choice)


def load(choice: str = "auto") -> None:
    """Load the UCX library of this process; again is fine, as long as it is the same one.

    Raises:
        UcxUnavailableError: there is none, it is too old, or this process uses another one.
    """
    if _REASON:
        raise UcxUnavailableError(_REASON)
    _ucx.load(find_library(choice))


def __getattr__(name: str) -> object:
    """Answer for what the extension would have brought, with the reason why it has not."""
    if _REASON and name in __all__:
        raise UcxUnavailableError(_REASON)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
