"""From block lists to one-sided operations, as few and as long as they can be.

A *block map* says for each of some blocks of the source which block of the target gets its bytes:
pairs, never positions, so a partial hit on a prefix lands where it belongs. Between a pool of
whole blocks and one with a piece a layer (`core.block_geometry`), the map 0→5, 1→6, 2→9 is

    source   | 0.0 0.1 | 1.0 1.1 | 2.0 2.1 |
    target   | ... | 5.0 | 6.0 | ... | 9.0 | ... | 5.1 | 6.1 | ... | 9.1 | ...

six operations: 0.1 and 1.0 are neighbours in the source only, 5.0 and 6.0 in the target only. With
a piece a layer on both sides it is four, since 0.0 and 1.0 go as one to 5.0 and 6.0, and 0.1 and 1.1
likewise.

Whatever the order of the list, two operations that are adjacent on both sides are one, unless it
would be longer than the wire allows. A *gap* is never bridged: in the target, the bytes between
two blocks are somebody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from kvservice.core.block_geometry import (
    POSITION_LIMIT,
    BlockGeometry,
    Fragments,
    check_array,
    shared_fragments,
)
from kvservice.core.errors import BatchSizeError, InvalidFieldError
from kvservice.core.slots import I64, U32, U64

OPERATIONS_LIMIT = 1 << 22
"""Operations of one plan: 16,384 blocks of 256 pieces. Planning takes 35 to 60 bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Operations to post, by ascending source segment and offset.

    Each moves `lengths` bytes from an offset in a source segment to an offset in a target segment;
    segments are indexes into the geometries' `segment_sizes_bytes`, and every operation lies within
    its segments on both sides.

    source_segments, target_segments: (operations,) uint32.
    source_offsets, target_offsets, lengths: (operations,) uint64, bytes.
    total_bytes: sum of the lengths, which is that of the mapped blocks.
    target, target_blocks: what was asked for, for `blocks_of`; the plan owns its copy of the list.
    """

    source_segments: U32
    source_offsets: U64
    target_segments: U32
    target_offsets: U64
    lengths: U64
    total_bytes: int
    target: BlockGeometry
    target_blocks: I64

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.lengths)

    def blocks_of(self, operations: I64) -> I64:
        """Return which pairs of the block map some operations carry bytes of, ascending.

        Where these operations failed, exactly the blocks of these pairs are incomplete. It is worked
        out here, from where the bytes land, so that a plan that succeeds does not pay for it.

        Raises:
            InvalidFieldError: there is no such operation.
        """
        check_array("operations", operations, np.int64)
        _check_indexes("operations", operations, len(self), "the operations of the plan")
        starts = self.target.positions(self.target_segments[operations], self.target_offsets[operations])
        order = np.argsort(starts)
        starts = starts[order]
        ends = starts + self.lengths[operations[order]].view(np.int64)
        is_touched = np.zeros(len(self.target_blocks), np.bool_)
        if len(starts):
            for origin, stride, length in zip(
                self.target.origins.tolist(),
                self.target.strides.view(np.int64).tolist(),
                self.target.lengths.tolist(),
                strict=True,
            ):
                pieces = origin + stride * self.target_blocks
                # Operations do not overlap, so the last one that begins before a piece's end is
                # the only one that need be looked at.
                last = starts.searchsorted(pieces + length) - 1
                is_touched |= (last >= 0) & (ends[last] > pieces)
        return np.flatnonzero(is_touched)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Bytes to move, as parallel arrays of positions on both sides and lengths."""

    source: I64
    target: I64
    lengths: I64

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indexes: I64) -> _Runs:
        """Return the runs at `indexes`, in that order."""
        return _Runs(self.source[indexes], self.target[indexes], self.lengths[indexes])


class Planner:
    """Plans for one pair of pools. It holds what does not depend on the blocks, and never changes.

    max_operation_bytes: the longest operation that the wire takes, or that its deadline allows.

    Raises:
        BlockSizeError: the blocks of the two sides differ in length.
        InvalidFieldError: the limit is out of its range.
    """

    def __init__(self, source: BlockGeometry, target: BlockGeometry, *, max_operation_bytes: int) -> None:
        if type(max_operation_bytes) is not int or not 1 <= max_operation_bytes <= POSITION_LIMIT:
            raise InvalidFieldError(
                f"max_operation_bytes = {max_operation_bytes!r}: allowed is 1..{POSITION_LIMIT}"
            )
        self._source = source
        self._target = target
        self._max_operation_bytes = max_operation_bytes
        self._block_bytes = source.block_bytes
        self._fragments = shared_fragments(source, target)
        is_whole = source.pieces_count == target.pieces_count == 1
        self._is_plain = is_whole and self._block_bytes <= max_operation_bytes

    def plan(self, source_blocks: I64, target_blocks: I64) -> Plan:
        """Plan to move block `source_blocks[i]` of the source to block `target_blocks[i]` of the target.

        source_blocks, target_blocks: (pairs,) int64, in any order. A source may have several targets.

        Raises:
            InvalidFieldError: a block that a pool does not have, or a target with two sources.
            BatchSizeError: more operations than a plan may have.
        """
        self._check_blocks(source_blocks, target_blocks)
        if len(source_blocks) == 1 and self._is_plain:
            return self._plan_one(source_blocks, target_blocks)
        order = np.argsort(source_blocks)
        sources, targets = source_blocks[order], target_blocks[order]
        is_source_unique = bool((sources[1:] != sources[:-1]).all())
        if not is_source_unique:
            # Copies of one block stand between a block and its next, so runs are found along
            # the target instead, where every byte is written once.
            order = np.argsort(target_blocks)
            sources, targets = source_blocks[order], target_blocks[order]
        starts, counts = _block_runs(sources, targets)
        if _overlaps(targets[starts], counts):
            _refuse_repeated(target_blocks)
        if self._fragments.is_dense:
            sources, targets = sources[starts], targets[starts]
        else:
            counts = np.ones(len(sources), np.int64)
        _check_operations_count(len(sources) * len(self._fragments))
        runs = _spread(self._fragments, sources, targets, counts)
        runs = _merged(runs, is_by_source=is_source_unique)
        runs = _split(runs, self._max_operation_bytes)
        if not is_source_unique:
            runs = runs.take(np.argsort(runs.source, kind="stable"))
        source_segments, source_offsets = self._source.places(runs.source)
        target_segments, target_offsets = self._target.places(runs.target)
        return Plan(
            source_segments=source_segments,
            source_offsets=source_offsets,
            target_segments=target_segments,
            target_offsets=target_offsets,
            lengths=runs.lengths.view(np.uint64),
            total_bytes=len(target_blocks) * self._block_bytes,
            target=self._target,
            target_blocks=target_blocks.copy(),
        )

    def _plan_one(self, source_blocks: I64, target_blocks: I64) -> Plan:
        """Plan for one block in one piece: on so little, what `plan` sorts costs more than the read."""
        source, target = self._source, self._target
        return Plan(
            source_segments=source.segments,
            source_offsets=source.offsets + source.strides * source_blocks.view(np.uint64),
            target_segments=target.segments,
            target_offsets=target.offsets + target.strides * target_blocks.view(np.uint64),
            lengths=source.lengths,
            total_bytes=self._block_bytes,
            target=target,
            target_blocks=target_blocks.copy(),
        )

    def _check_blocks(self, source_blocks: I64, target_blocks: I64) -> None:
        check_array("source_blocks", source_blocks, np.int64)
        check_array("target_blocks", target_blocks, np.int64)
        if len(source_blocks) != len(target_blocks):
            raise InvalidFieldError(
                f"source_blocks has {len(source_blocks)} entries and target_blocks {len(target_blocks)}: "
                "allowed is a pair for each block"
            )
        _check_indexes("source_blocks", source_blocks, self._source.blocks_count, "the source's blocks")
        _check_indexes("target_blocks", target_blocks, self._target.blocks_count, "the target's blocks")


def plan(
    source: BlockGeometry,
    target: BlockGeometry,
    source_blocks: I64,
    target_blocks: I64,
    *,
    max_operation_bytes: int,
) -> Plan:
    """Plan once for a pair of pools; see `Planner`, which is worth keeping for the next time."""
    return Planner(source, target, max_operation_bytes=max_operation_bytes).plan(source_blocks, target_blocks)


def _block_runs(sources: I64, targets: I64) -> tuple[I64, I64]:
    """Return where runs of consecutive blocks on both sides start, and how many blocks each has."""
    is_start = np.ones(len(sources), np.bool_)
    is_start[1:] = (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
    starts = np.flatnonzero(is_start)
    return starts, np.diff(starts, append=len(sources))


def _overlaps(firsts: I64, counts: I64) -> bool:
    """Say whether two runs of blocks have one in common."""
    order = np.argsort(firsts)
    firsts = firsts[order]
    return bool((firsts[1:] < firsts[:-1] + counts[order][:-1]).any())


def _refuse_repeated(target_blocks: I64) -> NoReturn:
    order = np.argsort(target_blocks, kind="stable")
    ordered = target_blocks[order]
    first = int(np.flatnonzero(ordered[1:] == ordered[:-1])[0])
    raise InvalidFieldError(
        f"target_blocks[{order[first + 1]}] = {ordered[first]}: the block is target_blocks[{order[first]}] "
        "already; allowed is one source for each target"
    )


def _spread(fragments: Fragments, sources: I64, targets: I64, counts: I64) -> _Runs:
    """Return the bytes of runs of blocks, by fragment; by source address where bands have one width."""
    shape = (-1, 1, fragments.band_width)
    sources, targets, counts = (blocks.reshape(1, -1, 1) for blocks in (sources, targets, counts))
    source = fragments.source_origins.reshape(shape) + fragments.source_strides.reshape(shape) * sources
    target = fragments.target_origins.reshape(shape) + fragments.target_strides.reshape(shape) * targets
    return _Runs(source.ravel(), target.ravel(), (fragments.lengths.reshape(shape) * counts).ravel())


def _merged(runs: _Runs, *, is_by_source: bool) -> _Runs:
    """Return the runs by address on one side, with those made one that are adjacent on both."""
    lead = runs.source if is_by_source else runs.target
    if not (lead[1:] > lead[:-1]).all():
        order = np.argsort(lead)
        runs, lead = runs.take(order), lead[order]
    is_start = np.ones(len(runs), np.bool_)
    is_start[1:] = runs.source[1:] - runs.source[:-1] != runs.lengths[:-1]
    is_start[1:] |= runs.target[1:] - runs.target[:-1] != runs.lengths[:-1]
    if is_start.all():
        return runs
    starts = np.flatnonzero(is_start)
    ends = lead + runs.lengths
    lasts = np.append(starts[1:], len(runs)) - 1
    return _Runs(runs.source[starts], runs.target[starts], ends[lasts] - lead[starts])


def _split(runs: _Runs, max_operation_bytes: int) -> _Runs:
    """Cut runs that are longer than one operation may be, a full one at a time from their beginnings.

    Cutting at blocks would leave operations shorter, and more of them.
    """
    if not len(runs) or int(runs.lengths.max()) <= max_operation_bytes:
        return runs
    counts = -(-runs.lengths // max_operation_bytes)
    _check_operations_count(int(counts.sum()))
    owners = np.repeat(np.arange(len(runs)), counts)
    done = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_operation_bytes
    cut = runs.take(owners)
    return _Runs(cut.source + done, cut.target + done, np.minimum(cut.lengths - done, max_operation_bytes))


def _check_operations_count(count: int) -> None:
    if count > OPERATIONS_LIMIT:
        raise BatchSizeError(
            f"the plan has up to {count} operations: allowed is {OPERATIONS_LIMIT}; plan fewer blocks at a "
            "time, or allow longer operations"
        )


def _check_indexes(name: str, indexes: I64, count: int, noun: str) -> None:
    if len(indexes) and not 0 <= int(indexes.min()) <= int(indexes.max()) < count:
        first = int(np.flatnonzero((indexes < 0) | (indexes >= count))[0])
        raise InvalidFieldError(f"{name}[{first}] = {indexes[first]}: allowed is 0..{count - 1}, {noun}")
