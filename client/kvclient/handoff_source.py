"""What a handoff's blocks are on this side: numbers, operations, and checksums."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvclient.buffers import BlockBuffers
from kvclient.pool import BlockPool
from kvclient.results import DirectSource
from kvservice import native
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.checksums import differing
from kvservice.core.engine_memory import MemoryKind
from kvservice.core.errors import (
    BlockSizeError,
    ChecksumMismatchError,
    InvalidFieldError,
    MalformedError,
)
from kvservice.core.plan import Planner
from kvservice.core.slots import I64, U32
from kvservice.ports.one_sided import RemoteRead

MAX_OPERATION_BYTES = 4 << 20
"""Longest operation: long enough that its cost is its bytes, short enough that a deadline is kept
to within a few milliseconds, and that several lanes get their share of one run of blocks."""

BLOCK_NUMBER_LIMIT = 1 << 32

PLANNERS_LIMIT = 256
"""Pairs of an engine's pool and one of ours; as many as memories that are remembered."""


def named_blocks(blocks: npt.ArrayLike, keys_count: int | None, parts_count: int) -> U32:
    """Return (keys, parts) uint32 of numbers given for each key, or for each key and part.

    keys_count: what there must be; None takes what is there.

    Raises:
        InvalidFieldError: they are no such numbers.
    """
    try:
        given = np.asarray(blocks)
    except ValueError as error:
        raise InvalidFieldError(f"blocks is no array of numbers: {error}") from error
    if given.size == 0:
        given = given.reshape(0, parts_count).astype(np.int64)
    if given.dtype.kind not in "iu":
        raise InvalidFieldError(f"blocks has dtype {given.dtype}; give integers")
    if given.ndim == 1:
        given = np.repeat(given[:, None], parts_count, axis=1)
    if given.ndim != 2 or given.shape[1] != parts_count:  # noqa: PLR2004 - keys and parts
        raise InvalidFieldError(
            f"blocks has shape {given.shape}; give one number for each key, or (keys, {parts_count})"
        )
    if keys_count is not None and len(given) != keys_count:
        raise InvalidFieldError(f"blocks names {len(given)} keys; {keys_count} were given")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) < BLOCK_NUMBER_LIMIT:
        raise InvalidFieldError(
            f"blocks goes from {int(given.min())} to {int(given.max())}; give u32 numbers"
        )
    return np.ascontiguousarray(given, np.uint32)


def named_checksums(checksums: npt.ArrayLike, keys_count: int, parts_count: int) -> U32:
    """Return (keys, parts) uint32 of checksums that a caller gives.

    Raises:
        InvalidFieldError: they are not one for each block.
    """
    given = np.asarray(checksums)
    if given.dtype != np.uint32 or given.size != keys_count * parts_count:
        raise InvalidFieldError(
            f"checksums is an array of {given.dtype} of shape {given.shape}; give uint32 of shape "
            f"({keys_count}, {parts_count})"
        )
    return np.ascontiguousarray(given).reshape(keys_count, parts_count)


def check_targets(into: Sequence[BlockPool], named: U32) -> None:
    """Hold the blocks that are received into to their pools, each to be written once.

    Raises:
        InvalidFieldError: a block that a pool does not have, or one for two keys.
    """
    for part, pool in enumerate(into):
        column = named[:, part]
        if not pool.is_writable:
            raise InvalidFieldError(f"into[{part}] is read-only memory; give writable arrays or tensors")
        if len(column) and int(column.max()) >= pool.blocks_count:
            raise InvalidFieldError(
                f"blocks names block {int(column.max())} of part {part}; the pool has blocks 0 to "
                f"{pool.blocks_count - 1}"
            )
        ordered = np.sort(column)
        repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
        if len(repeated):
            raise InvalidFieldError(
                f"blocks names block {int(ordered[repeated[0]])} of part {part} for two keys; give one each"
            )


def block_checksums(pools: Sequence[BlockPool], named: U32) -> U32 | None:
    """Return (keys, parts) uint32, CRC32C of each block; None where the memory is a device's."""
    if any(pool.kind is not MemoryKind.HOST for pool in pools):
        return None
    sums: U32 = np.zeros(named.shape, np.uint32)
    for part, pool in enumerate(pools):
        pieces = pool.pieces(named[:, part].astype(np.int64))
        column: U32 = np.zeros(len(named), np.uint32)
        native.checksum_blocks(pieces.addresses, pieces.lengths, pieces.counts, column)
        sums[:, part] = column
    return sums


def check_checksums(pools: Sequence[BlockPool], named: U32, expected: U32) -> None:
    """Hold received blocks to the checksums that were offered.

    Raises:
        ChecksumMismatchError: some differ; none of the batch is to be used.
    """
    sums = block_checksums(pools, named)
    if sums is None:
        return  # No pass over device memory is made for it.
    wrong = differing(sums.reshape(-1), np.ascontiguousarray(expected).reshape(-1))
    if len(wrong):
        raise ChecksumMismatchError(
            f"{len(wrong)} of {sums.size} received blocks do not have the checksum that was offered, "
            f"the first is block {int(wrong[0])}; look them up, or compute them"
        )


class Planners:
    """A planner for each pair of pools, made once. Thread-safe by the GIL."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[int, int], tuple[BlockGeometry, BlockGeometry, Planner]] = OrderedDict()

    def of(self, source: BlockGeometry, target: BlockGeometry) -> Planner:
        """Return the planner from one geometry to another. Raises BlockSizeError."""
        key = (id(source), id(target))
        found = self._made.get(key)
        if found is None:
            planner = Planner(source, target, max_operation_bytes=MAX_OPERATION_BYTES)
            # The geometries are kept, so that no other one can have their ids.
            found = self._made[key] = (source, target, planner)
            if len(self._made) > PLANNERS_LIMIT:
                self._made.popitem(last=False)
        return found[2]


def plan_parts(
    planners: Planners,
    source: DirectSource,
    into: Sequence[BlockPool],
    wanted: U32,
    named: U32,
    *,
    left_s: Callable[[], float],
) -> Iterator[RemoteRead]:
    """Yield the reads of each part.

    wanted, named: (keys, parts) uint32, from where and to where.
    left_s: returns for how long operations may still be posted; asked anew for each part.

    Raises:
        BlockSizeError: the blocks offered are not as long as the pool's.
        MalformedError: they are of other parts.
        InvalidFieldError: a block is named that a pool does not have.
    """
    if len(source.geometries) != len(into):
        raise MalformedError(f"a claim says where {len(source.geometries)} parts are; they are {len(into)}")
    for part, (geometry, pool) in enumerate(zip(source.geometries, into, strict=True)):
        if geometry.block_bytes != pool.block_bytes:
            raise BlockSizeError(
                f"a block of part {part} has {geometry.block_bytes} bytes where it is offered, and "
                f"{pool.block_bytes} in the pool that it goes to"
            )
        planner = planners.of(geometry, pool.geometry)
        sources: I64 = wanted[:, part].astype(np.int64)
        targets: I64 = named[:, part].astype(np.int64)
        plan = planner.plan(sources, targets)
        yield RemoteRead(
            source.segments,
            plan.source_segments,
            plan.source_offsets,
            pool.addresses[plan.target_segments] + plan.target_offsets,
            plan.lengths,
            left_s(),
        )


def pool_buffers(into: Sequence[BlockPool], named: U32) -> BlockBuffers:
    """Return the memory of blocks in pools as `read` takes it: key-major over the parts.

    Raises:
        InvalidFieldError: the memory is a device's, which only a direct handoff reaches.
    """
    if any(pool.kind is not MemoryKind.HOST for pool in into):
        raise InvalidFieldError("into is device memory; receive staged blocks through host memory")
    keys_count = len(named)
    by_part = [pool.pieces(named[:, part].astype(np.int64)) for part, pool in enumerate(into)]
    addresses = np.concatenate([some.addresses.reshape(keys_count, -1) for some in by_part], axis=1)
    lengths = np.concatenate([some.lengths.reshape(keys_count, -1) for some in by_part], axis=1)
    counts = np.tile(np.array([pool.geometry.pieces_count for pool in into], np.uint32), keys_count)
    return BlockBuffers.from_addresses(addresses.reshape(-1), lengths.reshape(-1), counts, tuple(into))
