"""From block lists to operations: what planning costs, beside a sort of the list and a copy of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.plan import Planner
from kvservice.core.slots import I64
from tests.bench.harness import Bench, Contender, Goal, Relation, cost_figure, mirrored, timed

ISSUE = "ucx"
PAIRS_COUNT = 16384
"""As many as one call may name."""

POOL_BLOCKS = 2 * PAIRS_COUNT
BLOCK_BYTES = 256 << 10
PIECES_COUNT = 32
RUN_BLOCKS = 16
MAX_OPERATION_BYTES = 1 << 30

MAPS_COUNT = 8
"""Different maps planned in turn, so that no branch is predicted from the time before."""

ROUNDS = 60
PIECEWISE_ROUNDS = 12

GOAL = Goal(Relation.BELOW, 1.0, on_ratio=False)

BlockMap = tuple[I64, I64]


def run(bench: Bench) -> None:
    """Measure the whole group."""
    random = np.random.default_rng(7)
    scattered = [(_blocks(random, 1), _blocks(random, 1)) for _ in range(MAPS_COUNT)]
    in_runs = [(_blocks(random, RUN_BLOCKS), _blocks(random, RUN_BLOCKS)) for _ in range(MAPS_COUNT)]
    for order, maps in (("random", scattered), (f"runs of {RUN_BLOCKS}", in_runs)):
        _plans(bench, f"whole blocks, {order}", (1, 1), maps)
        _plans(bench, f"whole to {PIECES_COUNT} pieces, {order}", (1, PIECES_COUNT), maps)
        _plans(bench, f"{PIECES_COUNT} to {PIECES_COUNT} pieces, {order}", (PIECES_COUNT, PIECES_COUNT), maps)


def _plans(bench: Bench, title: str, pieces_counts: tuple[int, int], maps: list[BlockMap]) -> None:
    """Plan between pools whose blocks have so many pieces; the goal is for whole blocks."""
    source, target = (_pool(count) for count in pieces_counts)
    planner = Planner(source, target, max_operation_bytes=MAX_OPERATION_BYTES)
    made = planner.plan(*maps[0])
    segments, offsets = (
        (made.source_segments, made.target_segments),
        (made.source_offsets, made.target_offsets),
    )
    arrays = (*segments, *offsets, made.lengths)
    contenders = {
        "plan": _each(maps, lambda block_map: planner.plan(*block_map)),
        # Blocks have to be brought into an order, and the operations to be written down.
        "least": _each(maps, lambda block_map: (block_map[0].argsort(), [array.copy() for array in arrays])),
    }
    pieces_count = max(pieces_counts)
    is_piecewise = pieces_count > 1
    samples = mirrored(contenders, bench.rounds(PIECEWISE_ROUNDS if is_piecewise else ROUNDS))
    figure = cost_figure(
        f"plan of {title}, of sort and copy",
        samples,
        "plan",
        "least",
        1e6 / (PAIRS_COUNT * MAPS_COUNT * pieces_count),
        None if is_piecewise else GOAL,
        "us/piece" if is_piecewise else "us/block",
    )
    bench.add(dataclasses.replace(figure, issue=ISSUE))


def _pool(pieces_count: int) -> BlockGeometry:
    """Return a pool of one segment with its blocks whole, or with a region for each piece."""
    piece_bytes = BLOCK_BYTES // pieces_count
    return BlockGeometry(
        segment_sizes_bytes=np.array([POOL_BLOCKS * BLOCK_BYTES], np.uint64),
        segments=np.zeros(pieces_count, np.uint32),
        offsets=np.arange(pieces_count, dtype=np.uint64) * np.uint64(POOL_BLOCKS * piece_bytes),
        strides=np.full(pieces_count, piece_bytes, np.uint64),
        lengths=np.full(pieces_count, piece_bytes, np.uint64),
        blocks_count=POOL_BLOCKS,
    )


def _blocks(random: np.random.Generator, run_blocks: int) -> I64:
    """Return blocks of half a pool, in runs that are in random order."""
    runs = random.permutation(POOL_BLOCKS // run_blocks)[: PAIRS_COUNT // run_blocks]
    return (runs[:, None] * run_blocks + np.arange(run_blocks)).ravel()


def _each(maps: list[BlockMap], act: Callable[[BlockMap], object]) -> Contender:
    """Return a contender that acts on each of the maps once."""

    def work() -> None:
        for block_map in maps:
            act(block_map)

    return timed(work)
