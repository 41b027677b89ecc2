"""What happens to leases, loads and saves over the lives of requests, without vLLM."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvplugins.vllm.scheduler_side import Roles
from tests.plugins.fakes import (
    BLOCK_TOKENS,
    BOTH_ROLES,
    FakeLeases,
    FakeRequest,
    FakeScheduler,
    keys,
    make_side,
)


def world(stored: int = 0, *, roles: Roles = BOTH_ROLES) -> tuple[FakeScheduler, FakeLeases]:
    """Return a scheduler, and a service that has the first blocks of the prompt "p"."""
    leases = FakeLeases(keys("p", stored))
    return FakeScheduler(make_side(leases, roles=roles)), leases


def prompt(tokens: int = 18, name: str = "r") -> FakeRequest:
    """Return a request for so many tokens of the prompt "p"."""
    return FakeRequest(name, "p", num_prompt_tokens=tokens)


def test_a_load_holds_its_lease_until_it_has_ended() -> None:
    """Between promise and last byte the blocks cannot be evicted; after it nothing is held."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    assert scheduler.admit(request) == 4 * BLOCK_TOKENS
    plan = scheduler.step()
    assert leases.held == {1}
    scheduler.load_ended("r")
    assert leases.held == set()
    assert [(work.request_id, work.block_ids) for work in plan.loads] == [("r", (1, 2, 3, 4))]
    assert list(plan.loads[0].keys) == keys("p", 4)


def test_a_load_starts_behind_what_the_engine_has_itself() -> None:
    """Source and target of each block are named by pairs, never by their place in a list."""
    scheduler, _ = world(stored=4)
    request = scheduler.arrive(prompt())
    assert scheduler.admit(request, local_tokens=2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    (work,) = scheduler.step().loads
    assert list(work.keys) == keys("p", 4)[2:]
    assert work.block_ids == (3, 4)


@pytest.mark.parametrize(("tokens", "blocks"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_always_computed(tokens: int, blocks: int) -> None:
    """The engine needs the hidden state of the last token, so a prompt never loads whole."""
    scheduler, leases = world(stored=8)
    request = scheduler.arrive(prompt(tokens))
    assert scheduler.admit(request) == blocks * BLOCK_TOKENS
    assert len(leases.held) == (blocks > 0)


def test_asking_again_costs_nothing() -> None:
    """VLLM asks in each step that a request waits for memory: one lookup answers all, hit or miss."""
    scheduler, leases = world(stored=4)
    hit = scheduler.arrive(prompt())
    miss = scheduler.arrive(FakeRequest("m", "other", num_prompt_tokens=18))
    for _ in range(100):
        assert scheduler.side.matched_tokens(hit, 0) == 4 * BLOCK_TOKENS
        assert scheduler.side.matched_tokens(miss, 0) == 0
    assert leases.lookups_count == 2
    assert leases.held == {1}


def test_a_claim_shrinks_with_what_the_engine_finds_itself() -> None:
    """While a request waits, others may cache its first blocks: the rest is still under the lease."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    assert scheduler.side.matched_tokens(request, 0) == 4 * BLOCK_TOKENS
    assert scheduler.admit(request, local_tokens=3 * BLOCK_TOKENS) == BLOCK_TOKENS
    (work,) = scheduler.step().loads
    assert work.keys == (keys("p", 4)[3],)
    assert leases.lookups_count == 1
    scheduler.load_ended("r")
    assert leases.held == set()


def test_a_claim_that_no_longer_fits_is_released_and_asked_anew() -> None:
    """If the engine lost or gained blocks outside the claim, the old lease goes before a new one comes."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.side.matched_tokens(request, 2 * BLOCK_TOKENS)
    assert scheduler.side.matched_tokens(request, 0) == 4 * BLOCK_TOKENS
    assert leases.held == {2}
    assert scheduler.side.matched_tokens(request, 4 * BLOCK_TOKENS) == 0
    assert leases.held == set()


def test_a_claim_that_vllm_does_not_take_is_released() -> None:
    """VLLM may allocate without the external tokens that it was offered."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.side.matched_tokens(request, 0)
    scheduler.allocate(request, 0)
    assert leases.held == set()
    assert scheduler.step().loads == []


def test_a_request_aborted_before_it_has_memory_releases_its_claim() -> None:
    """The lookup leased, and nothing after it happens: the lease must not stay (LMCache #1034)."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.side.matched_tokens(request, 0)
    scheduler.side.finished("r")
    assert leases.held == set()
    assert scheduler.side.requests_count == 0


def test_a_request_aborted_while_it_loads_keeps_its_lease_until_the_workers_are_done() -> None:
    """They may be copying under it; vLLM holds the blocks back as long, and so does the lease."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.admit(request)
    scheduler.step()
    scheduler.side.finished("r")
    assert leases.held == {1}
    scheduler.load_ended("r")
    assert leases.held == set()
    assert scheduler.side.requests_count == 0


def test_a_request_never_claims_again_after_it_lost_blocks() -> None:
    """With policy recompute vLLM asks again at once; the same answer would go round for ever."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.admit(request)
    scheduler.step()
    scheduler.load_ended("r", lost=[3])
    assert leases.held == set()
    assert scheduler.admit(request) == 0
    scheduler.preempt(request)
    assert scheduler.admit(request) == 0
    assert leases.lookups_count == 1


def test_lost_blocks_that_come_before_the_end_of_the_load_count_for_their_request_alone() -> None:
    """Ranks report when they find out; only the request that owns the blocks recomputes."""
    scheduler, leases = world(stored=4)
    first, second = scheduler.arrive(prompt(name="a")), scheduler.arrive(prompt(name="b"))
    scheduler.admit(first)
    scheduler.admit(second)
    scheduler.step()
    scheduler.load_ended(lost=[7])
    assert leases.held == {1, 2}
    scheduler.load_ended("a", "b")
    scheduler.preempt(first)
    scheduler.preempt(second)
    assert scheduler.admit(first) == 4 * BLOCK_TOKENS
    assert scheduler.admit(second) == 0


def test_a_load_reported_failed_by_request_counts_as_lost() -> None:
    """VLLM has a second way to say so, which names requests."""
    scheduler, _ = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.admit(request)
    scheduler.side.workers_reported(ended=["r"], failed=["r"], invalid_block_ids=())
    assert scheduler.admit(request) == 0


def test_a_preempted_request_looks_again_and_may_load_more() -> None:
    """It starts over; meanwhile the service may have more, and a miss of the first time does not stick."""
    scheduler, leases = world(stored=0)
    request = scheduler.arrive(prompt())
    assert scheduler.admit(request) == 0
    scheduler.step(request, tokens=6)
    leases.stored.update(keys("p", 3))
    scheduler.preempt(request)
    assert scheduler.admit(request) == 3 * BLOCK_TOKENS
    scheduler.step()
    scheduler.load_ended("r")
    assert leases.held == set()


def test_reports_about_requests_that_are_gone_change_nothing() -> None:
    """Late and doubled reports are counted by nobody and crash nobody (vLLM #53049)."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.admit(request)
    scheduler.load_ended("r")
    scheduler.load_ended("r", "never seen", lost=[1, 2, 999])
    scheduler.side.finished("r")
    scheduler.side.finished("r")
    scheduler.load_ended("r")
    assert leases.released == [1]


def test_a_producer_never_looks_and_a_consumer_never_saves() -> None:
    """VLLM's roles are kept."""
    scheduler, leases = world(stored=4, roles=Roles(loads=False, saves=True, saves_decode=False))
    request = scheduler.arrive(prompt())
    assert scheduler.admit(request) == 0
    assert leases.lookups_count == 0
    assert len(scheduler.step(request).saves) == 1
    scheduler, _ = world(roles=Roles(loads=True, saves=False, saves_decode=False))
    request = scheduler.arrive(prompt())
    scheduler.admit(request)
    assert scheduler.step(request).saves == []


def test_a_request_that_may_not_read_caches_loads_nothing() -> None:
    """Requests for prompt log-probabilities need every token computed."""
    scheduler, leases = world(stored=4)
    request = scheduler.arrive(dataclasses.replace(prompt(), skip_reading_prefix_cache=True))
    assert scheduler.admit(request) == 0
    assert leases.lookups_count == 0


def test_a_chunked_prefill_saves_each_block_once_when_it_is_whole() -> None:
    """A block is worth storing when its last token is computed, and not before."""
    scheduler, _ = world()
    request = scheduler.arrive(prompt(18))
    scheduler.admit(request)
    saved = [
        [work.block_ids for work in scheduler.step(request, tokens=count).saves] for count in (3, 6, 1, 8)
    ]
    assert saved == [[], [(1, 2)], [], [(3, 4)]]


def test_blocks_that_the_engine_found_in_its_own_cache_are_offered_too() -> None:
    """The service may have lost them since; a prefix with a hole is worth nothing to others."""
    scheduler, _ = world()
    request = scheduler.arrive(prompt(18))
    scheduler.admit(request, local_tokens=8)
    (work,) = scheduler.step(request).saves
    assert list(work.keys) == keys("p", 4)
    assert work.block_ids == (1, 2, 3, 4)


def test_blocks_of_generated_tokens_are_saved_only_when_asked_for() -> None:
    """They are rarely of use to another request, and a decode step is the worst moment to wait."""
    for saves_decode, expected in ((False, [(1, 2)]), (True, [(1, 2), (3,)])):
        scheduler, _ = world(roles=Roles(loads=True, saves=True, saves_decode=saves_decode))
        request = scheduler.arrive(prompt(10))
        scheduler.admit(request)
        saved = [work.block_ids for work in scheduler.step(request).saves]
        for _ in range(3):
            request.num_tokens += 1
            request.rehash()
            scheduler.block_ids["r"] = [1, 2, 3, 4]
            saved += [work.block_ids for work in scheduler.step(request).saves]
        assert saved == expected


def test_blocks_with_draft_tokens_are_not_saved() -> None:
    """A step may compute tokens that are rejected afterwards; a block of known tokens alone has a hash."""
    scheduler, _ = world(roles=Roles(loads=True, saves=True, saves_decode=True))
    request = scheduler.arrive(prompt(10))
    scheduler.admit(request)
    (work,) = scheduler.step(request, tokens=10 + 5).saves
    assert work.block_ids == (1, 2)


def test_a_preempted_request_saves_from_the_blocks_that_it_has_now() -> None:
    """After preemption its blocks are others; what was handed over before is not handed over again."""
    scheduler, _ = world()
    request = scheduler.arrive(prompt(18))
    scheduler.admit(request)
    assert [work.block_ids for work in scheduler.step(request, tokens=8).saves] == [(1, 2)]
    scheduler.preempt(request)
    scheduler.admit(request)
    (work,) = scheduler.step(request).saves
    assert list(work.keys) == keys("p", 4)[2:]
    assert work.block_ids == (8, 9)


def test_shutdown_releases_claims_and_loads() -> None:
    """Nothing outlives the engine."""
    scheduler, leases = world(stored=4)
    scheduler.side.matched_tokens(scheduler.arrive(prompt(name="claims")), 0)
    scheduler.admit(scheduler.arrive(prompt(name="loads")))
    assert leases.held == {1, 2}
    scheduler.side.shutdown()
    assert leases.held == set()
    assert scheduler.side.requests_count == 0


def test_after_any_history_no_lease_is_left(rng: random.Random) -> None:
    """Whatever order vLLM's calls come in, granted leases = released ones once the last request is gone."""
    scheduler, leases = world(stored=6)
    waiting: list[FakeRequest] = []
    loading: list[FakeRequest] = []
    running: list[FakeRequest] = []
    gone_while_loading: list[FakeRequest] = []
    for number in range(2000):
        action = rng.choice(["arrive", "ask", "admit", "end", "preempt", "finish", "abort"])
        if action == "arrive":
            waiting.append(scheduler.arrive(prompt(rng.randrange(1, 30), f"r{number}")))
        elif action == "ask" and waiting:
            scheduler.side.matched_tokens(rng.choice(waiting), rng.randrange(4) * BLOCK_TOKENS)
        elif action == "admit" and waiting:
            request = waiting.pop(rng.randrange(len(waiting)))
            local_tokens = min(rng.randrange(4) * BLOCK_TOKENS, (request.num_tokens - 1) // 4 * 4)
            (loading if scheduler.admit(request, local_tokens=local_tokens) else running).append(request)
        elif action == "end" and loading + gone_while_loading:
            request = rng.choice(loading + gone_while_loading)
            lost = rng.sample(scheduler.block_ids[request.request_id], rng.randrange(2))
            scheduler.load_ended(request.request_id, lost=lost)
            if request in loading:
                loading.remove(request)
                waiting.append(request)
            else:
                gone_while_loading.remove(request)
        elif action == "preempt" and running:
            request = running.pop()
            scheduler.preempt(request)
            waiting.append(request)
        elif action == "finish" and running:
            scheduler.side.finished(running.pop().request_id)
        elif action == "abort" and waiting + loading:
            request = rng.choice(waiting + loading)
            scheduler.side.finished(request.request_id)
            if request in loading:
                loading.remove(request)
                gone_while_loading.append(request)
            else:
                waiting.remove(request)
        scheduler.step()
        assert len(leases.released) == len(set(leases.released)), "a lease was released twice"
        assert len(leases.held) <= len(waiting + loading + gone_while_loading)
    for request in loading + gone_while_loading:
        scheduler.load_ended(request.request_id)
    for request in waiting + running + loading:
        scheduler.side.finished(request.request_id)
    assert leases.granted
    assert leases.held == set()
    assert scheduler.side.requests_count == 0
