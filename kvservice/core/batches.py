"""Keys and spaces of a request, turned into slots and back.

Per-slot arrays are key-major: slot `k * parts + p` is key `k` in space `p`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.core.books import Books, Tenant
from kvservice.core.namespace import Space
from kvservice.core.records import SlotBatch, SlotGroup
from kvservice.core.row_table import KEY_BYTES, RowLocations
from kvservice.core.slot_pool import SlotPool
from kvservice.core.slots import I64, U32, U64, Slots

Mask = npt.NDArray[np.bool_]


def committed_mask(tenant: Tenant, spaces: list[Space], keys: bytes) -> Mask:
    """(keys,) bool: committed in all spaces."""
    mask = tenant.directory.find_mask(keys, spaces[0].id)
    for space in spaces[1:]:
        mask &= tenant.directory.find_mask(keys, space.id)
    return mask


def pending_mask(tenant: Tenant, spaces: list[Space], keys: bytes) -> Mask:
    """(keys,) bool: reserved by somebody in any space."""
    mask = tenant.pending.find_mask(keys, spaces[0].id)
    for space in spaces[1:]:
        mask |= tenant.pending.find_mask(keys, space.id)
    return mask


def prefix_length(mask: Mask) -> int:
    """Return the number of leading True."""
    return len(mask) if mask.all() else int(mask.argmin())


def pick_keys(keys: bytes, mask: Mask) -> bytes:
    """Return the packed keys where `mask` holds."""
    if mask.all():
        return keys
    return np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)[mask].tobytes()


def committed_slots(books: Books, tenant: Tenant, spaces: list[Space], keys: bytes) -> SlotBatch:
    """Return the slots of keys that are committed in all spaces."""
    parts = len(spaces)
    groups: list[SlotGroup] = []
    count = len(keys) // KEY_BYTES
    for part, space in enumerate(spaces):
        pool = books.pool(tenant, space.slot_bytes)
        located = tenant.directory.find(keys, space.id)
        indexes = pool.indexes_of(located.segments, located.granules)
        groups.append(SlotGroup(pool, indexes, np.arange(part, count * parts, parts)))
    return SlotBatch(tuple(groups), count * parts)


def slots_at(books: Books, tenant: Tenant, space: Space, located: RowLocations, count: int) -> SlotBatch:
    """Return the slots of the first `count` keys of a look at the directory, all found."""
    pool = books.pool(tenant, space.slot_bytes)
    indexes = pool.indexes_of(located.segments[:count], located.granules[:count])
    return SlotBatch((SlotGroup(pool, indexes, np.arange(count)),), count)


def describe(batch: SlotBatch, *, with_checksums: bool) -> Slots:
    """Return where the slots of a batch are, in key-major order."""
    if len(batch.groups) == 1:
        return batch.groups[0].pool.slots(batch.groups[0].indexes, with_checksums=with_checksums)
    segments: U32 = np.empty(batch.count, dtype=np.uint32)
    granules: U32 = np.empty(batch.count, dtype=np.uint32)
    generations: U64 = np.empty(batch.count, dtype=np.uint64)
    checksums: U32 = np.zeros(batch.count, dtype=np.uint32)
    for group in batch.groups:
        slots = group.pool.slots(group.indexes, with_checksums=False)
        segments[group.positions] = slots.segments
        granules[group.positions] = slots.granules
        generations[group.positions] = slots.generations
        checksums[group.positions] = group.pool.checksums[group.indexes]
    return Slots(segments, granules, generations, checksums if with_checksums else None)


def subset(batch: SlotBatch, slot_indexes: I64) -> SlotBatch:
    """Return the slots of a batch at some of its positions, in that order."""
    if len(batch.groups) == 1:
        group = batch.groups[0]
        picked = SlotGroup(group.pool, group.indexes[slot_indexes], np.arange(len(slot_indexes)))
        return SlotBatch((picked,), len(slot_indexes))
    owner = np.empty(batch.count, dtype=np.int64)
    inner = np.empty(batch.count, dtype=np.int64)
    for number, group in enumerate(batch.groups):
        owner[group.positions] = number
        inner[group.positions] = group.indexes
    groups = []
    for number, group in enumerate(batch.groups):
        positions = np.flatnonzero(owner[slot_indexes] == number)
        if len(positions):
            groups.append(SlotGroup(group.pool, inner[slot_indexes[positions]], positions))
    return SlotBatch(tuple(groups), len(slot_indexes))


def pin(batch: SlotBatch) -> None:
    """Count one more holder of each slot."""
    for group in batch.groups:
        # A batch names a slot once, so a plain fancy add counts right.
        group.pool.pins[group.indexes] += 1


def payload_bytes(books: Books, batch: SlotBatch) -> U64:
    """(slots,) uint64: bytes of the block in each slot, without the padding."""
    lengths = np.empty(batch.count, dtype=np.uint64)
    for group in batch.groups:
        spaces = group.pool.spaces[group.indexes]
        sizes = {space: books.spaces.get(space).block_bytes for space in np.unique(spaces).tolist()}
        lengths[group.positions] = [sizes[space] for space in spaces.tolist()]
    return lengths


__all__ = [
    "SlotPool",
    "committed_mask",
    "committed_slots",
    "describe",
    "payload_bytes",
    "pending_mask",
    "pick_keys",
    "pin",
    "prefix_length",
    "subset",
]
