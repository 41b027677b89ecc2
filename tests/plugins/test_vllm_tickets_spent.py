"""Requests that were prefilled elsewhere: what becomes of their tickets, without vLLM."""

from __future__ import annotations

import random

import pytest

from kvplugins.vllm.plan import BlockWork
from kvplugins.vllm.scheduler_side import Roles
from tests.plugins.fakes import (
    BLOCK_TOKENS,
    BOTH_ROLES,
    FakeHandoffs,
    FakeLeases,
    FakeRequest,
    FakeScheduler,
    keys,
    make_side,
    ticket,
)


def world(stored: int = 0, *, roles: Roles = BOTH_ROLES) -> tuple[FakeScheduler, FakeHandoffs, FakeLeases]:
    """Return a scheduler, its handoffs, and a store that has the first blocks of the prompt "p"."""
    leases, handoffs = FakeLeases(keys("p", stored)), FakeHandoffs()
    return FakeScheduler(make_side(leases, handoffs=handoffs, roles=roles)), handoffs, leases


def prompt(tokens: int = 18, name: str = "r", blocks: int = 4, handoff: int = 77) -> FakeRequest:
    """Return a request for so many tokens of the prompt "p", with a ticket for its first blocks."""
    params = ticket(blocks, handoff).params()
    return FakeRequest(name, "p", num_prompt_tokens=tokens, kv_transfer_params=params)


def test_a_ticket_is_spent_by_the_load() -> None:
    """The blocks come from the other engine: the store is not asked, and nothing is leased."""
    scheduler, handoffs, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    assert scheduler.admit(request) == 4 * BLOCK_TOKENS
    (work,) = scheduler.step().loads
    assert list(work.keys) == keys("p", 4)
    assert work.block_ids == (1, 2, 3, 4)
    assert work.handoff is not None
    assert (work.handoff.handoff_ids, work.handoff.first_key) == ((77,), 0)
    scheduler.load_ended("r")
    scheduler.allocate(request, 0)
    scheduler.side.finished("r")
    assert (leases.lookups_count, handoffs.rejected) == (0, [])
    assert scheduler.side.tickets.counts.tickets_spent == 1
    assert scheduler.side.requests_count == 0


def test_blocks_that_the_engine_has_are_not_fetched() -> None:
    """The load begins behind them, at the same place of the handoff."""
    scheduler, _, _ = world()
    request = scheduler.arrive(prompt())
    assert scheduler.admit(request, local_tokens=3 * BLOCK_TOKENS) == BLOCK_TOKENS
    (work,) = scheduler.step().loads
    assert work.keys == (keys("p", 4)[3],)
    assert work.block_ids == (4,)
    assert work.handoff is not None
    assert work.handoff.first_key == 3


@pytest.mark.parametrize(("tokens", "blocks"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_computed_here(tokens: int, blocks: int) -> None:
    """Prefill hands over the block that the prompt ends with, and decode leaves it."""
    scheduler, _, _ = world()
    request = scheduler.arrive(prompt(tokens, blocks=tokens // BLOCK_TOKENS))
    assert scheduler.admit(request) == blocks * BLOCK_TOKENS


def test_a_ticket_for_more_than_the_prompt_promises_the_prompt() -> None:
    """The number comes from outside; what it promises has to be there in the request."""
    scheduler, _, _ = world()
    assert scheduler.admit(scheduler.arrive(prompt(blocks=1_000_000))) == 4 * BLOCK_TOKENS


def test_a_ticket_that_is_not_needed_is_given_back_at_once() -> None:
    """The other engine waits for its memory: with all blocks here, nobody will come for them."""
    scheduler, handoffs, _ = world()
    request = scheduler.arrive(prompt())
    assert scheduler.admit(request, local_tokens=4 * BLOCK_TOKENS) == 0
    assert handoffs.rejected == [77]
    scheduler.side.finished("r")
    assert handoffs.rejected == [77]


def test_a_ticket_for_less_than_the_engine_has_is_given_back_when_the_store_is_taken() -> None:
    """The store has what lies behind; the ticket is of no use any more."""
    scheduler, handoffs, leases = world(stored=4)
    request = scheduler.arrive(prompt(blocks=2))
    assert scheduler.admit(request, local_tokens=3 * BLOCK_TOKENS) == BLOCK_TOKENS
    (work,) = scheduler.step().loads
    assert work.handoff is None
    assert handoffs.rejected == [77]
    scheduler.load_ended("r")
    assert leases.held == set()


@pytest.mark.parametrize("has_asked", [False, True])
def test_a_request_aborted_before_its_load_gives_its_ticket_back(has_asked: bool) -> None:
    """Nobody else knows that nobody comes."""
    scheduler, handoffs, _ = world()
    request = scheduler.arrive(prompt())
    if has_asked:
        scheduler.side.matched_tokens(request, 0)
    scheduler.side.finished("r")
    assert handoffs.rejected == [77]
    assert scheduler.side.requests_count == 0


def test_a_request_aborted_while_it_loads_leaves_the_end_to_the_workers() -> None:
    """They may be reading; they complete it, or give it up."""
    scheduler, handoffs, _ = world()
    request = scheduler.arrive(prompt())
    scheduler.admit(request)
    scheduler.step()
    scheduler.side.finished("r")
    assert handoffs.rejected == []
    scheduler.load_ended("r")
    assert handoffs.rejected == []
    assert scheduler.side.requests_count == 0


def test_a_load_that_failed_gives_its_ticket_back_and_never_claims_again() -> None:
    """It may not have begun, and the request would ask for the same for ever (pitfall of recomputing)."""
    scheduler, handoffs, leases = world(stored=4)
    request = scheduler.arrive(prompt())
    scheduler.admit(request)
    scheduler.step()
    scheduler.load_ended("r", lost=[1, 2, 3, 4])
    assert handoffs.rejected == [77]
    assert scheduler.admit(request) == 0
    assert leases.lookups_count == 0


def test_asking_again_answers_the_same() -> None:
    """VLLM asks in each step that a request waits for memory."""
    scheduler, _, _ = world()
    request = scheduler.arrive(prompt())
    assert {scheduler.side.matched_tokens(request, 0) for _ in range(9)} == {4 * BLOCK_TOKENS}
    assert scheduler.side.matched_tokens(request, BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    assert scheduler.side.matched_tokens(request, 0) == 4 * BLOCK_TOKENS


def test_samples_of_one_prompt_share_a_ticket_and_one_spends_it() -> None:
    """A claim succeeds once: the second must not end what the first is reading."""
    scheduler, handoffs, _ = world(stored=2)
    first, second = scheduler.arrive(prompt(name="a")), scheduler.arrive(prompt(name="b"))
    assert scheduler.admit(first) == 4 * BLOCK_TOKENS
    assert scheduler.admit(second) == 2 * BLOCK_TOKENS
    scheduler.side.finished("b")
    assert handoffs.rejected == []
    assert scheduler.side.tickets.counts.tickets_refused == 1


@pytest.mark.parametrize(
    "params",
    [
        ticket(4, daemon_incarnation=b"another").params(),
        ticket(4, namespace_id=b"another").params(),
        {"do_remote_prefill": True, "kvservice_handoff_ids": "no list"},
    ],
)
def test_a_ticket_that_is_not_ours_costs_nothing_but_itself(params: dict[str, object]) -> None:
    """Of another daemon, another model, or made up: the request is served as one without."""
    scheduler, handoffs, _ = world(stored=2)
    request = FakeRequest("r", "p", num_prompt_tokens=18, kv_transfer_params=params)
    scheduler.arrive(request)
    assert scheduler.admit(request) == 2 * BLOCK_TOKENS
    assert scheduler.step().loads[0].handoff is None
    assert scheduler.side.tickets.counts.tickets_refused == 1
    scheduler.side.finished("r")
    assert handoffs.rejected == []


def test_an_engine_that_does_not_load_gives_tickets_back() -> None:
    """A request sent to the wrong engine must not hold the right one's memory."""
    scheduler, handoffs, _ = world(roles=Roles(loads=False, saves=True, saves_decode=False))
    assert scheduler.admit(scheduler.arrive(prompt())) == 0
    assert handoffs.rejected == [77]


def test_shutdown_gives_all_tickets_back() -> None:
    """Nothing waits for an engine that is gone."""
    scheduler, handoffs, _ = world()
    scheduler.arrive(prompt(name="a", handoff=1))
    scheduler.side.matched_tokens(scheduler.arrive(prompt(name="b", handoff=2)), 0)
    scheduler.side.shutdown()
    assert sorted(handoffs.rejected) == [1, 2]


@pytest.mark.parametrize(
    ("saves_handed_off", "can_offer", "saved"), [(True, True, 4), (False, True, 0), (False, False, 4)]
)
def test_what_is_handed_over_is_stored_unless_the_operator_says_no(
    saves_handed_off: bool, can_offer: bool, saved: int
) -> None:
    """Without a way to hand it over it is stored in any case: else nobody would ever find it."""
    roles = Roles(loads=False, saves=True, saves_decode=False, saves_handed_off=saves_handed_off)
    scheduler, handoffs, _ = world(roles=roles)
    handoffs.can_offer = can_offer
    request = FakeRequest("r", "p", num_prompt_tokens=18, kv_transfer_params={"do_remote_decode": True})
    scheduler.arrive(request)
    scheduler.admit(request)
    assert sum(len(work.keys) for work in scheduler.step(request).saves) == saved


def test_after_any_history_every_ticket_was_spent_or_given_back(rng: random.Random) -> None:
    """Whatever order vLLM's calls come in, no other engine is left waiting, and none is told twice."""
    scheduler, handoffs, leases = world(stored=6)
    waiting: list[FakeRequest] = []
    loading: dict[str, FakeRequest] = {}
    gone: set[str] = set()
    running: list[FakeRequest] = []
    works: dict[str, BlockWork] = {}
    arrived, received = set(), set()

    def end_load(name: str, lost: list[int]) -> FakeRequest:
        scheduler.load_ended(name, lost=lost)
        work = works.pop(name)
        if work.handoff is not None and not set(lost) & set(work.block_ids):
            received.update(work.handoff.handoff_ids)
        return loading.pop(name)

    for number in range(3000):
        action = rng.choice(["arrive", "ask", "admit", "end", "preempt", "finish", "abort"])
        if action == "arrive":
            request = prompt(rng.randrange(1, 30), f"r{number}", rng.randrange(1, 9), number)
            waiting.append(scheduler.arrive(request))
            arrived.add(number)
        elif action == "ask" and waiting:
            scheduler.side.matched_tokens(rng.choice(waiting), rng.randrange(4) * BLOCK_TOKENS)
        elif action == "admit" and waiting:
            request = waiting.pop(rng.randrange(len(waiting)))
            local_tokens = min(rng.randrange(4) * BLOCK_TOKENS, (request.num_tokens - 1) // 4 * 4)
            if scheduler.admit(request, local_tokens=local_tokens):
                loading[request.request_id] = request
            else:
                running.append(request)
        elif action == "end" and loading:
            name = rng.choice(list(loading))
            request = end_load(name, rng.sample(scheduler.block_ids[name], rng.randrange(2)))
            if name not in gone:
                waiting.append(request)
        elif action == "preempt" and running:
            waiting.append(running.pop())
            scheduler.preempt(waiting[-1])
        elif action == "finish" and running:
            scheduler.side.finished(running.pop().request_id)
        elif action == "abort" and waiting:
            scheduler.side.finished(waiting.pop().request_id)
        elif action == "abort" and loading:
            name = rng.choice(list(loading))
            gone.add(name)
            scheduler.side.finished(name)
        works |= {work.request_id: work for work in scheduler.step().loads}
    for request in [end_load(name, []) for name in list(loading)] + waiting + running:
        scheduler.side.finished(request.request_id)
    assert received
    assert len(handoffs.rejected) == len(set(handoffs.rejected)), "a ticket was given back twice"
    assert received.isdisjoint(handoffs.rejected)
    assert received | set(handoffs.rejected) == arrived
    assert leases.held == set()
    assert scheduler.side.requests_count == 0
