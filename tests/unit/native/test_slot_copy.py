import threading

import google_crc32c
import numpy as np
import pytest

from kvservice.core.row_layout import SlotOutcome
from kvservice.core.slots import GRANULE_BYTES

SEGMENT_BYTES = 1 << 16
NEVER = 2**63


class Slots:
    """Slots in two segments, numbers 1 and 3, with their generation words, and a caller's pieces."""

    def __init__(self, *, lengths=((700,), (512, 88), (1,), (3000, 0, 5)), segment_bytes=SEGMENT_BYTES):
        rng = np.random.default_rng(11)
        self.memory = [rng.integers(0, 256, segment_bytes, dtype=np.uint8) for _ in range(2)]
        self.words = [np.full(segment_bytes // GRANULE_BYTES, 5, dtype=np.uint64) for _ in range(2)]
        self.bases, self.sizes, self.word_bases = (np.zeros(4, dtype=np.uint64) for _ in range(3))
        for number, memory, words in zip((1, 3), self.memory, self.words, strict=True):
            self.bases[number], self.sizes[number] = memory.ctypes.data, segment_bytes
            self.word_bases[number] = words.ctypes.data
        count = len(lengths)
        self.segments = np.array([1 + 2 * (i % 2) for i in range(count)], dtype=np.uint32)
        widest = max(-(-sum(block) // GRANULE_BYTES) for block in lengths)
        self.granules = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(widest)
        self.generations = np.full(count, 5, dtype=np.uint64)
        self.counts = np.array([len(block) for block in lengths], dtype=np.uint32)
        self.lengths = np.array([size for block in lengths for size in block], dtype=np.uint64)
        self.mine = [rng.integers(0, 256, int(size), dtype=np.uint8) for size in self.lengths]
        self.addresses = np.array([piece.ctypes.data for piece in self.mine], dtype=np.uint64)
        self.checksums = np.zeros(count, dtype=np.uint32)

    def copy(self, operations, *, is_write, checksums=True):
        """Copy all slots and return (outcome, slot)."""
        return operations.copy_slots(
            self.segments,
            self.granules,
            self.generations,
            self.bases,
            self.sizes,
            self.word_bases,
            self.addresses,
            self.lengths,
            self.counts,
            self.checksums if checksums else None,
            is_write,
        )

    def in_slot(self, slot):
        """Give the bytes of a slot, as many as its block has."""
        start = int(self.granules[slot]) * GRANULE_BYTES
        memory = self.memory[int(self.segments[slot]) // 2]
        return memory[start : start + len(self.in_pieces(slot))].tobytes()

    def in_pieces(self, slot):
        """Give the bytes of a block's pieces, one after the other."""
        first = int(self.counts[:slot].sum())
        return b"".join(piece.tobytes() for piece in self.mine[first : first + int(self.counts[slot])])


@pytest.mark.parametrize("is_write", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_the_bytes_and_their_checksums_arrive(bulk, is_write, checksums):
    """Pieces and slot hold the same bytes afterwards: those of the side that was copied from."""
    slots = Slots()
    before = [(slots.in_pieces if is_write else slots.in_slot)(slot) for slot in range(4)]
    assert slots.copy(bulk, is_write=is_write, checksums=checksums) == (SlotOutcome.COPIED, 0)
    assert [slots.in_slot(slot) for slot in range(4)] == before
    assert [slots.in_pieces(slot) for slot in range(4)] == before
    if checksums:
        assert slots.checksums.tolist() == [google_crc32c.value(content) for content in before]


@pytest.mark.parametrize(
    ("array", "value", "outcome"),
    [
        ("segments", 2, SlotOutcome.UNMAPPED),
        ("segments", 4, SlotOutcome.UNMAPPED),
        ("segments", 2**32 - 1, SlotOutcome.UNMAPPED),
        ("granules", SEGMENT_BYTES // GRANULE_BYTES, SlotOutcome.OUTSIDE),
        ("granules", 2**32 - 1, SlotOutcome.OUTSIDE),
        ("generations", 6, SlotOutcome.STALE),
    ],
)
def test_one_bad_slot_stops_the_copy_before_its_first_byte(operations, array, value, outcome):
    """All slots are looked at before anything moves, and the bad one is named."""
    slots = Slots()
    before = [memory.copy() for memory in slots.memory]
    getattr(slots, array)[2] = value
    assert slots.copy(operations, is_write=True) == (outcome, 2)
    assert all((memory == old).all() for memory, old in zip(slots.memory, before, strict=True))


def test_a_generation_that_moves_during_the_copy_is_seen(operations):
    """Another thread moves it once the first bytes have arrived; tried until it comes in time to matter."""
    slots = Slots(lengths=((64 << 20,),), segment_bytes=65 << 20)
    slots.mine[0][:] = 1
    slots.granules[0] = 1
    memory, words = slots.memory[0], slots.words[0]
    outcomes = set()
    for _ in range(50):
        memory[GRANULE_BYTES] = 0
        slots.generations[0] = words[1]
        thread = threading.Thread(target=disown_at_first_byte, args=(memory, words))
        thread.start()
        outcomes.add(slots.copy(operations, is_write=True)[0])
        thread.join()
        if SlotOutcome.MOVED in outcomes:
            break
    assert SlotOutcome.MOVED in outcomes
    assert outcomes <= {SlotOutcome.MOVED, SlotOutcome.COPIED}


def disown_at_first_byte(memory, words):
    """Move the generation of the slot at granule 1 as soon as a byte of it has changed."""
    while not memory[GRANULE_BYTES]:
        pass
    words[1] += np.uint64(1)


def test_no_slots_are_no_mistake(operations):
    """An empty batch copies nothing."""
    none = np.empty(0, dtype=np.uint64)
    few = np.empty(0, dtype=np.uint32)
    assert operations.copy_slots(few, few, none, none, none, none, none, none, None, None, True) == (0, 0)


@pytest.mark.parametrize("name", ["segments", "granules", "generations", "sizes", "word_bases", "addresses"])
def test_arrays_that_disagree_are_refused_by_name(operations, name):
    """Native code trusts its arrays, so each is held to the number of slots or segments."""
    slots = Slots()
    setattr(slots, name, getattr(slots, name)[:-1].copy())
    with pytest.raises(
        ValueError, match=name.replace("sizes", "segment_sizes").replace("word", "generation")
    ):
        slots.copy(operations, is_write=True)
