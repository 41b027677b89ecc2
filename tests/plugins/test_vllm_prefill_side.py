"""Requests that are decoded elsewhere: when their blocks may be used again, without vLLM."""

from __future__ import annotations

import pytest

from kvplugins.vllm.prefill_side import OFFERS_PER_STEP_MAX, PrefillSide
from kvplugins.vllm.ticket import Ticket
from tests.plugins.fakes import BLOCK_TOKENS, FakeHandoffs, FakeRequest, keys

ASKS = {"do_remote_decode": True}


def world() -> tuple[PrefillSide, FakeHandoffs]:
    """Return a prefill side and its handoffs."""
    handoffs = FakeHandoffs()
    return PrefillSide(handoffs=handoffs, block_tokens=BLOCK_TOKENS), handoffs


def prefilled(tokens: int = 18, name: str = "r", params: dict[str, object] | None = ASKS) -> FakeRequest:
    """Return a request whose prompt is computed, with one token more."""
    request = FakeRequest(
        name, "p", num_prompt_tokens=tokens, num_tokens=tokens + 1, kv_transfer_params=params
    )
    request.num_computed_tokens = tokens
    return request


def test_the_whole_blocks_of_the_prompt_are_offered_and_kept_until_they_are_released() -> None:
    """VLLM is told to keep them, the client where they wait, and the workers, once, that they are free."""
    side, handoffs = world()
    must_keep, params = side.finished(prefilled(), [11, 12, 13, 14, 15], is_whole=True)
    assert must_keep
    assert Ticket.of(params) == handoffs.offers[0].ticket
    assert handoffs.offers[0].keys == keys("p", 4)
    assert handoffs.offers[0].block_ids == [11, 12, 13, 14]
    assert side.take_released() == []
    handoffs.offers[0].has_been_released = True
    assert side.take_released() == ["r"]
    assert side.take_released() == []
    assert side.open_count == 0
    assert (side.counts.handoffs_offered, side.counts.handoffs_released) == (1, 1)


@pytest.mark.parametrize(
    ("tokens", "params", "is_whole"),
    [(18, None, True), (18, {"do_remote_decode": False}, True), (18, ASKS, False), (3, ASKS, True)],
)
def test_what_is_not_to_be_handed_over_is_freed_at_once(
    tokens: int, params: dict[str, object] | None, is_whole: bool
) -> None:
    """No one asked; the request was aborted; or there is no whole block."""
    side, handoffs = world()
    assert side.finished(prefilled(tokens, params=params), [1, 2, 3, 4, 5], is_whole=is_whole) == (
        False,
        None,
    )
    assert handoffs.offers == []


def test_only_what_is_computed_is_offered() -> None:
    """A request that ended in the middle of its prompt, or lost its blocks, has less than its hashes."""
    side, handoffs = world()
    request = prefilled()
    request.num_computed_tokens = 11
    side.finished(request, [1, 2, 3], is_whole=True)
    assert handoffs.offers[0].block_ids == [1, 2]
    preempted = prefilled(name="preempted")
    assert side.finished(preempted, [], is_whole=True) == (False, None)


def test_generated_tokens_are_not_offered() -> None:
    """The ticket speaks of the prompt, which is all that the other engine has."""
    side, handoffs = world()
    request = FakeRequest("r", "p", num_prompt_tokens=9, num_tokens=30, kv_transfer_params=ASKS)
    request.num_computed_tokens = 29
    side.finished(request, list(range(8)), is_whole=True)
    assert handoffs.offers[0].block_ids == [0, 1]


def test_without_a_service_the_blocks_are_freed_at_once() -> None:
    """The other engine computes; nothing waits for a service that is gone."""
    side, handoffs = world()
    handoffs.can_offer = False
    assert side.finished(prefilled(), [1, 2, 3, 4, 5], is_whole=True) == (False, None)
    assert side.counts.handoffs_unoffered == 1


def test_an_offer_that_some_rank_could_not_make_is_kept_and_told_to_nobody() -> None:
    """What was offered may not be freed, though nobody is to come for it."""
    side, handoffs = world()
    handoffs.is_complete = False
    assert side.finished(prefilled(), [1, 2, 3, 4, 5], is_whole=True) == (True, None)
    handoffs.offers[0].has_been_released = True
    assert side.take_released() == ["r"]
    assert (side.counts.handoffs_offered, side.counts.handoffs_unoffered) == (0, 1)


def test_of_very_many_offers_each_is_asked_in_turn() -> None:
    """A step asks so many at most; none waits behind one that is never released."""
    side, handoffs = world()
    for number in range(3 * OFFERS_PER_STEP_MAX):
        side.finished(prefilled(name=f"{number}"), [1, 2, 3, 4], is_whole=True)
    for offer in handoffs.offers[1:]:
        offer.has_been_released = True
    released = [name for _ in range(4) for name in side.take_released()]
    assert sorted(released, key=int) == [f"{number}" for number in range(1, 3 * OFFERS_PER_STEP_MAX)]
    assert side.open_count == 1


def test_a_fault_while_asking_costs_a_step_and_no_block() -> None:
    """A request that is forgotten is never freed, and vLLM makes steps for it for ever."""
    side, handoffs = world()
    side.finished(prefilled(name="a"), [1, 2, 3, 4], is_whole=True)
    side.finished(prefilled(name="b"), [5, 6, 7, 8], is_whole=True)
    handoffs.offers[0].has_been_released = True
    handoffs.offers[1].fault = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        side.take_released()
    handoffs.offers[1].fault = None
    assert side.take_released() == ["a"]
