from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, final

import numpy as np
import numpy.typing as npt

from kvservice.core.slots import U32, U64

STATUS_OUTSIDE: int
STATUS_NOT_POSTED: int
STATUS_UNSETTLED: int
STATUS_UNCONFIRMED: int
OUTCOME_DONE: int
OUTCOME_FAILED: int
OUTCOME_DEADLINE: int
OUTCOME_LOST: int
OUTCOME_CLOSED: int
WINDOW_MAX: int
LOG_LINES: int

def load(path: str, /) -> None: ...

# Empty until a library is loaded.
def library_version() -> str: ...
def library_path() -> str: ...
def status_text(status: int, /) -> str: ...

# The oldest first; at most LOG_LINES are kept.
def drain_log() -> list[str]: ...

# Whatever waits or may wait does so without the GIL. Methods of one worker, and of what
# belongs to it, may be called from several threads; they share the worker in turns, so a
# second worker is what makes two threads faster than one. Everything is a context manager
# that closes; closing twice is fine, and closing the worker closes what belongs to it.

@final
class Worker:
    # Settings by UCX's names without UCX_: {"TLS": "tcp,cma,self", "NET_DEVICES": "eth0"}.
    def __new__(cls, config: Mapping[str, str]) -> Self: ...
    # To give to peers; in an envelope.
    @property
    def address(self) -> bytes: ...
    @property
    def is_closed(self) -> bool: ...
    # An operation could not be ended: no more transfers, and memory stays until `close`.
    @property
    def is_poisoned(self) -> bool: ...
    # The memory stays the caller's, and must stay mapped until the registration is closed.
    # UcxError: UCX has no transport for this kind of memory here.
    def register(
        self, address: int, length: int, memory_kind: Literal["host", "cuda"] = ...
    ) -> Registration: ...
    # Does not wait. MalformedError: not an address.
    def connect(self, peer_address: bytes, *, is_watched: bool) -> Endpoint: ...
    # One batch; returns an Outcome, and a status for each operation. Endpoints not yet
    # wired up are, before anything is posted. Once `deadline_ns` (of time.monotonic_ns)
    # passes, or an endpoint fails, no more is posted: what is under way on watched
    # endpoints is cut off, which ends the endpoint too; what is under way on others gets
    # `grace_ns` to end. UnsettledError: it did not, and the worker is poisoned.
    # `local_memory` holds all local ranges: UCX then need not look each up.
    def transfer(
        self,
        *,
        is_put: bool,
        segments: Sequence[RemoteSegment],
        segment_indexes: U32,
        local: U64,
        remote: U64,
        lengths: U64,
        statuses: npt.NDArray[np.int32],
        window: int,
        deadline_ns: int,
        watched: Endpoint | None = None,
        local_memory: Registration | None = None,
        grace_ns: int = ...,
    ) -> int: ...
    # Makes progress until `stop_fd` can be read or the worker is closed, asleep while
    # there is nothing to do. One thread at a time. The descriptor stays the caller's.
    def serve(self, stop_fd: int, /) -> None: ...
    # Once; whether anything moved.
    def progress(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class Endpoint:
    @property
    def is_watched(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    # What UCX told, or that it was cut off. Only progress on the worker brings it.
    @property
    def failure(self) -> str | None: ...
    # Waits until UCX has connected; False: not by `deadline_ns`, or it failed. `transfer`
    # does it too.
    def wire(self, deadline_ns: int, /) -> bool: ...
    # UCX's own words on the transports that it chose.
    def describe(self) -> str: ...
    # MalformedError: not a remote key. ValueError: not within what the peer registered.
    def attach(self, rkey: bytes, base: int, length: int) -> RemoteSegment: ...
    # Stops the transfers that use it and waits for them.
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class RemoteSegment:
    @property
    def base(self) -> int: ...
    @property
    def length(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class Registration:
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    # To give to peers; in an envelope that names the range too.
    @property
    def rkey(self) -> bytes: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
