"""Settings, values and errors of the kvservice client.

The client itself is `kvclient.aio.KvClient` or `kvclient.sync.KvClient`.
"""

from __future__ import annotations

from kvclient.buffers import BlockBuffers
from kvclient.config import ClientSettings
from kvclient.errors import (
    ArenaFullError,
    BatchSizeError,
    BlockSizeError,
    ChecksumMismatchError,
    DeadlineError,
    DrainingError,
    DuplicateKeyError,
    EventsLostError,
    IncompleteBlockError,
    InvalidFieldError,
    InvariantError,
    KvError,
    LeaseExpiredError,
    LeaseUnknownError,
    LimitReachedError,
    MalformedError,
    NotOwnerError,
    PeerUnavailableError,
    QuotaExceededError,
    Reason,
    RequestIdReusedError,
    ReservationAbortedError,
    ReservationExpiredError,
    ReservationUnknownError,
    SessionUnknownError,
    SpaceNotOpenError,
    StaleGenerationError,
    StaleIncarnationError,
    TenantUnknownError,
    UnknownMethodError,
)
from kvclient.keys import Keys, packed_keys
from kvclient.representation import Identity, Part, Shape
from kvclient.results import (
    Attachment,
    GetResult,
    Lease,
    Limits,
    LookupResult,
    PutResult,
    Reservation,
)
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.slots import Slots

__all__ = [
    "ArenaFullError",
    "Attachment",
    "BatchSizeError",
    "BlockBuffers",
    "BlockSizeError",
    "ChecksumMismatchError",
    "ClientSettings",
    "DeadlineError",
    "DrainingError",
    "DuplicateKeyError",
    "EventsLostError",
    "GetResult",
    "Identity",
    "IncompleteBlockError",
    "InvalidFieldError",
    "InvariantError",
    "ItemOutcome",
    "Keys",
    "KvError",
    "Lease",
    "LeaseExpiredError",
    "LeaseUnknownError",
    "LimitReachedError",
    "Limits",
    "LookupResult",
    "MalformedError",
    "NotOwnerError",
    "Part",
    "PeerUnavailableError",
    "PutResult",
    "QuotaExceededError",
    "Reason",
    "RequestIdReusedError",
    "Reservation",
    "ReservationAbortedError",
    "ReservationExpiredError",
    "ReservationUnknownError",
    "SessionUnknownError",
    "Shape",
    "Slots",
    "SpaceNotOpenError",
    "StaleGenerationError",
    "StaleIncarnationError",
    "TenantUnknownError",
    "UnknownMethodError",
    "packed_keys",
]
