"""What every transport must keep to, written once.

A subclass of `TransportContract` gives a `harness` fixture: the transport, the owner
of the slots behind it, and a way to act between the check before a transfer and the
check after it. Transports whose owner checks capabilities also pass
`OwnerCheckedContract`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import google_crc32c
import numpy as np
import pytest

from kvservice.core.errors import (
    BlockSizeError,
    ChecksumMismatchError,
    InvalidFieldError,
    KvError,
    LeaseExpiredError,
    LeaseUnknownError,
    NotOwnerError,
    PeerUnavailableError,
    ReservationUnknownError,
    StaleGenerationError,
)
from kvservice.ports.transport import Pieces, Transfer, Transport
from tests.contract.transport_fakes import OTHER_TOKEN, TOKEN, Capability, FakeOwner

TIMEOUT_S = 10.0


@dataclass
class Harness:
    """A transport under test.

    connect: another transport of the kind, for a session token; the harness closes it.
    during: runs an action after the check before and ahead of the check after.
    """

    owner: FakeOwner
    transport: Transport
    connect: Callable[[bytes], Transport]
    during: Callable[[Callable[[], None]], AbstractContextManager[None]]


@dataclass
class Buffers:
    """A client's memory: pieces that lie scattered in one array, with gaps between."""

    memory: np.ndarray
    pieces: Pieces
    places: list[tuple[int, int]]

    @classmethod
    def of(cls, blocks: list[list[int]]) -> Buffers:
        """Make memory for blocks, each a list of lengths of its pieces."""
        lengths = [length for block in blocks for length in block]
        stops = np.cumsum([length + 3 for length in lengths])
        memory = np.zeros(int(stops[-1]) + 1, np.uint8)
        starts = [int(stop) - length for stop, length in zip(stops, lengths, strict=True)]
        # Backwards in memory, so that no order is right by chance.
        starts = [int(stops[-1]) - start - length for start, length in zip(starts, lengths, strict=True)]
        has_many = any(len(block) > 1 for block in blocks)
        pieces = Pieces(
            np.array(starts, np.uint64) + np.uint64(memory.ctypes.data),
            np.array(lengths, np.uint64),
            np.array([len(block) for block in blocks], np.uint32) if has_many else None,
        )
        return cls(memory, pieces, list(zip(starts, lengths, strict=True)))

    def blocks(self) -> list[bytes]:
        """Return the bytes of each block."""
        joined = [self.memory[start : start + length].tobytes() for start, length in self.places]
        counts = [1] * len(joined) if self.pieces.counts is None else self.pieces.counts.tolist()
        parts = iter(joined)
        return [b"".join(next(parts) for _ in range(count)) for count in counts]


SHAPES = {
    "one": [[4096]],
    "one of many pieces": [[512] * 33],
    "odd sizes": [[1], [511], [513], [65537], [3], [2]],
    "odd pieces": [[1, 2, 509], [7], [100, 1, 1, 1], [65536, 13]],
    "many": [[2048]] * 700,
    "many of many pieces": [[300, 212, 1536]] * 400,
    "larger than a chunk": [[1 << 20, 13], [5], [(1 << 19) + 1], [1 << 19], [100] * 3000],
}


def random_blocks(blocks: list[list[int]], seed: int) -> list[bytes]:
    """Return contents for blocks of these pieces."""
    generator = np.random.default_rng(seed)
    return [generator.bytes(sum(block)) for block in blocks]


def transfer(
    capability_id: int,
    capability: Capability,
    buffers: Buffers,
    *,
    indexes: list[int] | None = None,
    has_checksums: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Transfer:
    """Return a transfer of slots of a capability, all of them unless told."""
    chosen = np.arange(len(capability.lengths)) if indexes is None else np.array(indexes, np.int64)
    return Transfer(
        capability_id,
        capability.slots.take(chosen),
        chosen,
        capability.lengths[chosen],
        buffers.pieces,
        np.zeros(len(chosen), np.uint32) if has_checksums else None,
        timeout_s,
    )


def a_write(owner: FakeOwner, shape: list[list[int]], **options) -> tuple[Transfer, Capability, Buffers]:
    """Return a write of random bytes into fresh slots."""
    buffers = Buffers.of(shape)
    owner.kept.append(buffers)
    buffers.memory[:] = np.random.default_rng(1).integers(0, 256, len(buffers.memory), np.uint8)
    number, capability = owner.reserve([sum(block) for block in shape])
    return transfer(number, capability, buffers, **options), capability, buffers


def a_read(owner: FakeOwner, shape: list[list[int]], **options) -> tuple[Transfer, Capability, Buffers]:
    """Return a read of fresh committed slots of random bytes."""
    contents = random_blocks(shape, seed=2)
    number, capability = owner.lease(contents, [google_crc32c.value(content) for content in contents])
    buffers = Buffers.of(shape)
    owner.kept.append(buffers)
    return transfer(number, capability, buffers, **options), capability, buffers


def slots_of(owner: FakeOwner, capability: Capability) -> list[bytes]:
    """Return what lies in the slots of a capability."""
    return [owner.bytes_of(capability, index).tobytes() for index in range(len(capability.lengths))]


class TransportContract:
    """The rules of every transport."""

    @pytest.fixture(autouse=True)
    def every_transfer_ends_once(self, harness):
        """Each granted transfer is ended exactly once, whatever a test does."""
        yield
        assert harness.owner.wait_until_all_ended(TIMEOUT_S)
        assert set(harness.owner.ended.values()) <= {1}

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    @pytest.mark.parametrize("has_checksums", [True, False])
    def test_a_write_puts_exactly_the_pieces_into_the_slots(self, harness, shape, has_checksums):
        """After a write each slot holds the pieces of its block, one after the other."""
        moved, capability, buffers = a_write(harness.owner, shape, has_checksums=has_checksums)
        harness.transport.write(moved)
        assert slots_of(harness.owner, capability) == buffers.blocks()

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    @pytest.mark.parametrize("has_checksums", [True, False])
    def test_a_read_puts_exactly_the_slots_into_the_pieces(self, harness, shape, has_checksums):
        """After a read the pieces hold the slots, and nothing beside them has changed."""
        moved, capability, buffers = a_read(harness.owner, shape, has_checksums=has_checksums)
        harness.transport.read(moved)
        assert buffers.blocks() == slots_of(harness.owner, capability)
        for start, length in buffers.places:
            buffers.memory[start : start + length] = 0
        assert not buffers.memory.any()

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_checksums_are_crc32c_of_each_block(self, harness, shape):
        """The transport reports the CRC32C of each block, the same in both directions."""
        written, _, buffers = a_write(harness.owner, shape)
        harness.transport.write(written)
        assert written.checksums.tolist() == [google_crc32c.value(b) for b in buffers.blocks()]
        read, _, buffers = a_read(harness.owner, shape)
        harness.transport.read(read)
        assert read.checksums.tolist() == [google_crc32c.value(b) for b in buffers.blocks()]

    def test_some_slots_of_a_capability_in_another_order(self, harness):
        """A transfer moves the slots that it names, in its own order, and no others."""
        contents = random_blocks([[1000]] * 5, seed=3)
        sums = [google_crc32c.value(content) for content in contents]
        number, capability = harness.owner.lease(contents, sums)
        buffers = Buffers.of([[1000]] * 3)
        harness.transport.read(transfer(number, capability, buffers, indexes=[4, 0, 2]))
        assert buffers.blocks() == [contents[4], contents[0], contents[2]]

    def test_bytes_that_are_not_those_committed_are_refused(self, harness):
        """A read with checksums raises when a slot's bytes differ from its commit."""
        moved, capability, _ = a_read(harness.owner, [[5000]] * 3)
        harness.owner.bytes_of(capability, 1)[4999] ^= 1
        with pytest.raises(ChecksumMismatchError):
            harness.transport.read(moved)

    def test_bytes_are_not_checked_unless_asked(self, harness):
        """A read without checksums takes the bytes as they are."""
        moved, capability, buffers = a_read(harness.owner, [[5000]] * 3, has_checksums=False)
        harness.owner.bytes_of(capability, 1)[4999] ^= 1
        harness.transport.read(moved)
        assert buffers.blocks() == slots_of(harness.owner, capability)

    @pytest.mark.parametrize("make", [a_write, a_read])
    @pytest.mark.parametrize("index", [0, 3])
    def test_a_slot_that_had_another_owner_before_is_stale(self, harness, make, index):
        """A transfer of a slot whose generation has moved is refused."""
        moved, capability, _ = make(harness.owner, [[1024]] * 4)
        harness.owner.recycle(capability, index)
        with pytest.raises(StaleGenerationError):
            run(harness.transport, moved, capability)

    @pytest.mark.parametrize("make", [a_write, a_read])
    def test_a_slot_that_gets_another_owner_meanwhile_is_stale(self, harness, make):
        """A transfer fails when a slot's generation moves between its start and its end."""
        moved, capability, _ = make(harness.owner, [[1024]] * 4)
        with (
            harness.during(lambda: harness.owner.recycle(capability, 2)),
            pytest.raises(StaleGenerationError),
        ):
            run(harness.transport, moved, capability)

    @pytest.mark.parametrize("make", [a_write, a_read])
    def test_no_blocks_move_nothing(self, harness, make):
        """A transfer of no blocks succeeds at once."""
        moved, capability, _ = make(harness.owner, [[1024]])
        none = np.empty(0, np.uint64)
        empty = replace(
            moved,
            slots=moved.slots.take(slice(0, 0)),
            slot_indexes=np.empty(0, np.int64),
            lengths=none,
            pieces=Pieces(none, none),
            checksums=None,
        )
        run(harness.transport, empty, capability)
        assert harness.owner.wait_until_all_ended(1.0)

    @pytest.mark.parametrize(
        "change",
        [
            {"lengths": np.array([1024, 1024], np.uint64)},
            {"lengths": np.array([1024, 1023, 1024], np.uint64)},
            {"slot_indexes": np.array([0, 1])},
            {"checksums": np.zeros(4, np.uint32)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_arrays_that_disagree_are_refused(self, harness, change):
        """Native code never sees arrays whose sizes or sums contradict each other."""
        moved, capability, _ = a_read(harness.owner, [[1024]] * 3)
        with pytest.raises(InvalidFieldError):
            run(harness.transport, replace(moved, **change), capability)

    def test_counts_that_do_not_add_up_are_refused(self, harness):
        """Counts of pieces must be at least one each and name every piece."""
        moved, capability, _ = a_read(harness.owner, [[1024, 1024]] * 2)
        for counts in ([2, 3], [4, 0], [1, 1]):
            pieces = replace(moved.pieces, counts=np.array(counts, np.uint32))
            with pytest.raises(InvalidFieldError):
                run(harness.transport, replace(moved, pieces=pieces), capability)

    def test_a_closed_transport_refuses(self, harness):
        """After `close`, which may come twice, every transfer fails as a lost peer."""
        moved, capability, _ = a_read(harness.owner, [[1024]])
        harness.transport.close()
        harness.transport.close()
        with pytest.raises(PeerUnavailableError):
            run(harness.transport, moved, capability)

    def test_transfers_of_many_threads_do_not_mix(self, harness):
        """Eight threads write and read at once, and each finds its own bytes."""
        barrier = threading.Barrier(8)
        shape = [[3000, 1096]] * 20

        def pump(seed: int) -> bool:
            contents = random_blocks(shape, seed)
            sums = [google_crc32c.value(content) for content in contents]
            leased, lease = harness.owner.lease(contents, sums)
            barrier.wait(TIMEOUT_S)
            is_right = True
            for _ in range(5):
                buffers = Buffers.of(shape)
                harness.transport.read(transfer(leased, lease, buffers))
                is_right &= buffers.blocks() == contents
                reserved, reservation = harness.owner.reserve([4096] * 20)
                harness.transport.write(transfer(reserved, reservation, buffers))
                is_right &= slots_of(harness.owner, reservation) == contents
            return is_right

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(pump, range(8)))


class OwnerCheckedContract(TransportContract):
    """The rules of transports whose owner of the bytes checks the capability."""

    def test_it_says_so(self, harness):
        """The capability that callers decide by is declared."""
        assert harness.transport.capabilities.is_checked_by_owner

    @pytest.mark.parametrize("make", [a_write, a_read])
    def test_another_session_is_refused(self, harness, make):
        """A capability is worth nothing to a session of another engine."""
        moved, capability, _ = make(harness.owner, [[1024]])
        stranger = harness.connect(OTHER_TOKEN)
        with pytest.raises(NotOwnerError):
            run(stranger, moved, capability)

    @pytest.mark.parametrize(
        ("make", "unknown"), [(a_write, ReservationUnknownError), (a_read, LeaseUnknownError)]
    )
    def test_an_unknown_capability_is_refused(self, harness, make, unknown):
        """A capability that was never granted is refused by its exact name."""
        moved, capability, _ = make(harness.owner, [[1024]])
        with pytest.raises(unknown):
            run(harness.transport, replace(moved, capability_id=1), capability)

    @pytest.mark.parametrize("make", [a_write, a_read])
    def test_a_slot_index_out_of_range_is_refused(self, harness, make):
        """A transfer names slots of its own capability only."""
        moved, capability, _ = make(harness.owner, [[1024]] * 2)
        with pytest.raises(InvalidFieldError):
            run(harness.transport, replace(moved, slot_indexes=np.array([0, 2])), capability)

    @pytest.mark.parametrize("make", [a_write, a_read])
    def test_blocks_that_are_not_as_long_as_their_slots_are_refused(self, harness, make):
        """A payload of another size than the slots touches no slot and no piece."""
        moved, capability, _ = make(harness.owner, [[1024]] * 2)
        before = slots_of(harness.owner, capability)
        buffers = Buffers.of([[512]] * 2)
        short = replace(moved, lengths=np.array([512, 512], np.uint64), pieces=buffers.pieces)
        with pytest.raises(BlockSizeError):
            run(harness.transport, short, capability)
        assert slots_of(harness.owner, capability) == before
        assert not buffers.memory.any()

    @pytest.mark.parametrize("make", [a_write, a_read])
    def test_a_capability_that_ends_meanwhile_fails_the_transfer(self, harness, make):
        """The owner's word at the end counts: bytes that moved before it are discarded."""
        moved, capability, _ = make(harness.owner, [[1024]] * 2)

        def expire() -> None:
            capability.is_expired = True

        with harness.during(expire), pytest.raises(LeaseExpiredError):
            run(harness.transport, moved, capability)

    def test_a_failure_does_not_spoil_the_next_transfer(self, harness):
        """After any refusal the same transport still moves bytes."""
        for change in ({"capability_id": 1}, {"slot_indexes": np.array([9])}):
            moved, capability, _ = a_write(harness.owner, [[1024]])
            with pytest.raises(KvError):
                harness.transport.write(replace(moved, **change))
            moved, capability, buffers = a_write(harness.owner, [[1024]])
            harness.transport.write(moved)
            assert slots_of(harness.owner, capability) == buffers.blocks()


def run(transport: Transport, moved: Transfer, capability: Capability) -> None:
    """Run the transfer in the direction of its capability."""
    (transport.write if capability.is_write else transport.read)(moved)


@contextlib.contextmanager
def at_end(owner: FakeOwner, action: Callable[[], None]):
    """Run `action` in the owner's `end`, ahead of its check: `during` of a checking owner."""
    owner.on_end = action
    try:
        yield
    finally:
        owner.on_end = lambda: None


__all__ = ["TOKEN", "Harness", "OwnerCheckedContract", "TransportContract", "at_end"]
