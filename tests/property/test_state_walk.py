"""Long random walks of the state beside its model; a failure is replayed with the seed that pytest prints."""

import random

import pytest

from kvservice.core.outcomes import ItemOutcome
from tests.core_world import OPERATIONS
from tests.property.twin import Twin
from tests.property.walk import Walk

CHECK_EVERY_STEPS = 50
STEPS = {"native": 20_000, "numpy": 2_000}


@pytest.mark.parametrize("operations", OPERATIONS)
def test_a_random_walk_keeps_every_rule(operations, seed):
    """Whatever clients do, in whatever order: every answer is the model's, and the invariants hold."""
    twin = Twin(OPERATIONS[operations], check_every=CHECK_EVERY_STEPS)
    walk = Walk(twin, random.Random(seed))
    for step in range(STEPS[operations]):
        walk.step()
        if step % CHECK_EVERY_STEPS == 0:
            twin.check_blocks()
    ends = {outcome for outcomes, _ in twin.ended.values() for outcome in outcomes}
    assert ends >= {ItemOutcome.DONE, ItemOutcome.ALREADY_RELEASED, ItemOutcome.ALREADY_EXPIRED}
    assert twin.world.books.evicted_count > 0
