"""A small owner of slots for the transport contract: real memory, real generations."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvservice.core.errors import (
    ChecksumMismatchError,
    InvalidFieldError,
    KvError,
    LeaseExpiredError,
    LeaseUnknownError,
    NotOwnerError,
    ReservationUnknownError,
    StaleGenerationError,
)
from kvservice.core.slots import GRANULE_BYTES, I64, U8, U32, U64, Slots
from kvservice.ports.transport import Grant
from kvservice.transports.segments import OwnedSegment

TOKEN = b"the session of the test"
OTHER_TOKEN = b"a session of another engine"


@dataclass
class Capability:
    """A reservation or a lease of the fake."""

    slots: Slots
    lengths: U64
    is_write: bool
    is_expired: bool = False


@dataclass(repr=False)
class FakeOwner:
    """TransferAuthority over two segments.

    on_begin, on_end: run inside the call, before its checks; they may raise.
    kept: client memory that must live as long as a transfer may touch it.
    """

    segment_bytes: int = 8 << 20
    on_begin: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None
    kept: list[object] = field(default_factory=list)
    begun: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    all_ended: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self):
        self.segments = [OwnedSegment.create(self.segment_bytes) for _ in range(2)]
        self._free = [0, 0]
        self._capabilities: dict[int, Capability] = {}
        self._transfers: dict[int, tuple[Capability, I64]] = {}
        self._lock = threading.Lock()
        self._ids = 100

    def close(self):
        for segment in self.segments:
            segment.close()

    # ---- what a control plane would do

    def reserve(self, lengths: list[int]) -> tuple[int, Capability]:
        """Give slots, half of them in each segment, side by side, and a reservation of them."""
        with self._lock:
            segments, granules = [], []
            for index, length in enumerate(lengths):
                segment = index * 2 // len(lengths)
                segments.append(segment)
                granules.append(self._free[segment])
                self._free[segment] += -(-length // GRANULE_BYTES)
                assert self._free[segment] * GRANULE_BYTES <= self.segment_bytes
            slots = Slots(
                np.array(segments, np.uint32),
                np.array(granules, np.uint32),
                np.array([7] * len(lengths), np.uint64),
            )
            for segment, granule in zip(segments, granules, strict=True):
                self.segments[segment].generations[granule] = 7
            return self._add(Capability(slots, np.array(lengths, np.uint64), is_write=True))

    def lease(self, contents: list[bytes], checksums: list[int]) -> tuple[int, Capability]:
        """Give committed slots with these contents and checksums."""
        _, reserved = self.reserve([len(content) for content in contents])
        for index, content in enumerate(contents):
            self.bytes_of(reserved, index)[:] = np.frombuffer(content, np.uint8)
        slots = reserved.slots
        committed = np.array(checksums, np.uint32)
        slots = Slots(slots.segments, slots.granules, slots.generations, committed)
        with self._lock:
            return self._add(Capability(slots, reserved.lengths, is_write=False))

    def _add(self, capability: Capability) -> tuple[int, Capability]:
        self._ids += 1
        self._capabilities[self._ids] = capability
        return self._ids, capability

    def bytes_of(self, capability: Capability, index: int) -> U8:
        """Return the memory of one slot."""
        segment = self.segments[int(capability.slots.segments[index])]
        start = int(capability.slots.granules[index]) * GRANULE_BYTES
        view = segment.memory.view[start : start + int(capability.lengths[index])]
        return np.frombuffer(view, np.uint8)

    def recycle(self, capability: Capability, index: int):
        """Give one slot to another owner."""
        segment = self.segments[int(capability.slots.segments[index])]
        segment.generations[int(capability.slots.granules[index])] += 1

    def wait_until_all_ended(self, timeout_s: float) -> bool:
        """Wait until every transfer that began has ended once."""
        with self.all_ended:
            return self.all_ended.wait_for(lambda: self.begun == self.ended, timeout_s)

    # ---- TransferAuthority

    def begin_write(self, *, session_token: bytes, reservation_id: int, slot_indexes: I64) -> Grant:
        return self._begin(session_token, reservation_id, slot_indexes, ReservationUnknownError)

    def begin_read(self, *, session_token: bytes, lease_id: int, slot_indexes: I64) -> Grant:
        return self._begin(session_token, lease_id, slot_indexes, LeaseUnknownError)

    def _begin(self, token: bytes, capability_id: int, indexes: I64, unknown: type[KvError]) -> Grant:
        self.on_begin()
        with self._lock:
            capability = self._capabilities.get(capability_id)
            if capability is None or capability.is_write != (unknown is ReservationUnknownError):
                raise unknown(f"no capability {capability_id}")
            if token != TOKEN:
                raise NotOwnerError(f"capability {capability_id} is of another engine")
            if len(indexes) and not 0 <= indexes.min() <= indexes.max() < len(capability.lengths):
                raise InvalidFieldError("slot_indexes: out of range")
            self._check(capability, indexes)
            self._ids += 1
            transfer_id = self._ids
            self._transfers[transfer_id] = (capability, indexes)
            with self.all_ended:
                self.begun[transfer_id] += 1
        slots = capability.slots.take(indexes)
        bases = np.array([segment.address for segment in self.segments], np.uint64)
        addresses = bases[slots.segments] + slots.granules.astype(np.uint64) * np.uint64(512)
        return Grant(transfer_id, addresses, capability.lengths[indexes], slots.checksums)

    def end(self, transfer_id: int, *, checksums: U32 | None) -> None:
        capability, indexes = self._transfers[transfer_id]
        try:
            self.on_end()
            self._check(capability, indexes)
            if checksums is not None and len(checksums) != len(indexes):
                raise ChecksumMismatchError("one checksum for each slot is due")
        finally:
            with self.all_ended:
                self.ended[transfer_id] += 1
                self.all_ended.notify_all()

    def _check(self, capability: Capability, indexes: I64) -> None:
        if capability.is_expired:
            raise LeaseExpiredError("the lease expired")
        slots = capability.slots.take(indexes)
        for number, segment in enumerate(self.segments):
            chosen = slots.segments == number
            now = segment.generations[slots.granules[chosen]]
            if (now != slots.generations[chosen]).any():
                raise StaleGenerationError("a slot had another owner")
