"""Handoffs beside their model, driven by Hypothesis, which shrinks what it finds, and by seeded walks."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvservice.core.handoff_choice import HandoffChoice, HandoffPolicy
from kvservice.core.records import HandoffState
from tests.core_world import SECOND_NS
from tests.property.handoff_twin import ENDS, ENGINES, SETS, TENANTS, TRANSPORTS, HandoffTwin

PEOPLE_LIMIT = 10
CHECK_EVERY_STEPS = 10
STEPS = 5_000
REFUSALS = (
    "HandoffClaimedError",
    "HandoffEndedError",
    "HandoffUnknownError",
    "NoWayError",
    "NotOwnerError",
    "RepresentationMismatchError",
    "SegmentInUseError",
    "SegmentUnknownError",
    "SessionUnknownError",
)

NUMBERS = st.builds(
    lambda first, count: list(range(first, first + count)), st.integers(0, 6), st.integers(1, 4)
)
POLICIES = st.sampled_from((HandoffPolicy.ANY, HandoffPolicy.ANY, HandoffPolicy.DIRECT, HandoffPolicy.STAGED))


class HandoffMachine(RuleBasedStateMachine):
    """Each rule is a verb of the twin, which compares the answer and makes every check."""

    people = Bundle("people")
    passages = Bundle("passages")

    def __init__(self) -> None:
        super().__init__()
        self.twin = HandoffTwin()

    @initialize(target=people)
    def two_engines_of_two_processes(self):
        attach = self.twin.attach
        made = [attach(TENANTS[0], engine, is_local=True) for engine in ENGINES[:2] for _ in range(2)]
        self.twin.register(made[0], TRANSPORTS[0])
        return multiple(*made)

    @rule(
        target=people,
        tenant=st.sampled_from((*TENANTS, TENANTS[0], TENANTS[0])),
        engine=st.sampled_from(ENGINES),
        is_local=st.booleans(),
    )
    def attach(self, tenant, engine, is_local):
        return self.twin.attach(tenant, engine, is_local=is_local)

    @rule(person=people)
    def leave(self, person):
        self.twin.leave(person)

    @rule(seconds=st.sampled_from((0.5, 2, 3, 7, 11)))
    def advance(self, seconds):
        self.twin.advance(round(seconds * SECOND_NS))

    @rule(person=people, transports=st.sampled_from(TRANSPORTS))
    def register(self, person, transports):
        self.twin.register(person, transports)

    @rule(person=people)
    def unregister(self, person):
        self.twin.unregister(person)

    @rule(person=people, parts=st.sampled_from(SETS), numbers=NUMBERS)
    def put(self, person, parts, numbers):
        self.twin.put(person, parts, numbers)

    @rule(person=people)
    def fill(self, person):
        self.twin.put(person, SETS[0], list(range(100, 110)))

    @rule(person=people)
    def purge(self, person):
        self.twin.purge(person)

    @rule(
        target=passages,
        person=people,
        giver=st.none() | people,
        parts=st.sampled_from(SETS),
        numbers=NUMBERS,
        policy=POLICIES,
        ttl_s=st.sampled_from((0, 1, 20)),
    )
    def offer(self, person, giver, parts, numbers, policy, ttl_s):
        found = self.twin.offer(person, parts, numbers, giver=giver, policy=policy, ttl_s=ttl_s)
        return multiple(*([found] if found else []))

    @rule(person=people, passage=passages)
    def offer_again(self, person, passage):
        self.twin.offer_again(person, passage)

    @rule(
        person=people,
        passage=passages,
        transports=st.sampled_from((*TRANSPORTS, ())),
        is_wrong=st.sampled_from((False, False, False, True)),
    )
    def claim(self, person, passage, transports, is_wrong):
        self.twin.claim(person, passage, transports, is_wrong=is_wrong)

    @rule(person=people, passage=passages)
    def release(self, person, passage):
        self.twin.release(person, passage)

    @rule(person=people, passage=passages, how=st.sampled_from(ENDS))
    def end(self, person, passage, how):
        self.twin.end(person, passage, how)

    @rule(
        person=people,
        renew=st.lists(passages, max_size=3, unique=True),
        noticed=st.lists(passages, max_size=3, unique=True),
        is_letting_go=st.booleans(),
    )
    def beat(self, person, renew, noticed, is_letting_go):
        self.twin.beat(person, renew=renew, noticed=noticed, is_letting_go=is_letting_go)

    @rule(person=people, passage=passages)
    def look(self, person, passage):
        self.twin.look(person, passage)

    def teardown(self):
        self.twin.finish()


def test_handoffs_are_their_model():
    """After any steps: one claimer, no release while somebody may be reading, a release in the end."""
    run_state_machine_as_test(HandoffMachine, settings=settings(max_examples=50, stateful_step_count=40))


VERBS = {
    "attach": 5,
    "leave": 2,
    "advance": 10,
    "register": 5,
    "unregister": 4,
    "put": 8,
    "fill": 2,
    "purge": 1,
    "offer": 20,
    "offer_again": 2,
    "claim": 24,
    "release": 4,
    "end": 10,
    "beat": 24,
    "look": 3,
}


class Walk:
    """Steps at random, most of them sensible, some not."""

    def __init__(self, rng: random.Random) -> None:
        self.twin = HandoffTwin(check_every=CHECK_EVERY_STEPS)
        self._rng = rng
        self._dead = [self.twin.attach(TENANTS[0], ENGINES[0], is_local=False)]

    def step(self) -> None:
        """Do one thing."""
        verb = self._rng.choices(list(VERBS), weights=list(VERBS.values()))[0]
        getattr(self, f"_{verb}" if len(self.twin.people) > 3 else "_attach")()

    def _person(self, like=None):
        """Return somebody; of an engine, mostly, if there is one to be like."""
        living = list(self.twin.people.values())
        if self._rng.random() < 0.02:
            return self._rng.choice(self._dead[-10:])
        peers = [p for p in living if like is not None and p.engine == like.engine]
        return self._rng.choice(peers if peers and self._rng.random() < 0.8 else living)

    def _passage(self):
        live = [p for p in self.twin.passages if not p.ends]
        left = [p for p in live if p.owner.client.token not in self.twin.people]
        if left and self._rng.random() < 0.3:
            return self._rng.choice(left)
        known = self.twin.passages[-20:]
        return self._rng.choice(live if live and self._rng.random() < 0.8 else known) if known else None

    def _attach(self) -> None:
        if len(self.twin.people) < PEOPLE_LIMIT:
            tenant = TENANTS[self._rng.random() < 0.1]
            is_local = self._rng.random() < 0.6
            self._dead.append(self.twin.attach(tenant, self._rng.choice(ENGINES), is_local=is_local))

    def _leave(self) -> None:
        self.twin.leave(self._person())

    def _advance(self) -> None:
        self.twin.advance(round(self._rng.choice((0.1, 0.5, 1, 2, 3, 6)) * SECOND_NS))

    def _register(self) -> None:
        self.twin.register(self._person(), self._rng.choice(TRANSPORTS))

    def _unregister(self) -> None:
        self.twin.unregister(self._person())

    def _put(self) -> None:
        self.twin.put(self._person(), self._rng.choice(SETS), self._numbers())

    def _fill(self) -> None:
        first = self._rng.randrange(100, 120)
        self.twin.put(self._person(), SETS[0], list(range(first, first + 10)))

    def _purge(self) -> None:
        self.twin.purge(self._person())

    def _numbers(self) -> list[int]:
        first = self._rng.randrange(6)
        return list(range(first, first + self._rng.randint(1, 4)))

    def _offer(self) -> None:
        person = self._person()
        givers = [p for p in self.twin.people.values() if p.layouts and p.engine == person.engine]
        giver = self._rng.choice(givers) if givers and self._rng.random() < 0.9 else self._person()
        policy = self._rng.choice((HandoffPolicy.ANY, HandoffPolicy.ANY, *HandoffPolicy))
        is_direct = policy is not HandoffPolicy.STAGED and self._rng.random() < 0.8
        self.twin.offer(
            person,
            self._rng.choice(SETS),
            self._numbers(),
            giver=giver if is_direct else None,
            policy=policy,
            ttl_s=self._rng.choice((0, 0, 1, 20)),
        )

    def _offer_again(self) -> None:
        if (passage := self._passage()) is not None:
            self.twin.offer_again(self._person(like=passage.owner), passage)

    def _claim(self) -> None:
        if (passage := self._passage()) is not None:
            transports = self._rng.choice((*TRANSPORTS, TRANSPORTS[2], TRANSPORTS[2], ()))
            is_wrong = self._rng.random() < 0.05
            person = passage.claimer if self._rng.random() < 0.1 else None
            self.twin.claim(person or self._person(), passage, transports, is_wrong=is_wrong)

    def _release(self) -> None:
        if (passage := self._passage()) is not None:
            self.twin.release(self._person(like=passage.claimer), passage)

    def _end(self) -> None:
        if (passage := self._passage()) is not None:
            side = self._rng.choice((passage.owner, passage.claimer, passage.claimer))
            self.twin.end(self._person(like=side), passage, self._rng.choice(ENDS))

    def _beat(self) -> None:
        person = self._person()
        mine = [p for p in self.twin.passages if p.claimer is not None and p.claimer.engine == person.engine]
        renewed = mine[-4:] if self._rng.random() < 0.3 else self.twin.passages[-2:]
        noticed = self._rng.sample(self.twin.passages, len(self.twin.passages) // 2)
        is_letting_go = self._rng.random() < 0.4
        self.twin.beat(person, renew=renewed, noticed=noticed, is_letting_go=is_letting_go)

    def _look(self) -> None:
        if (passage := self._passage()) is not None:
            self.twin.look(self._person(like=passage.owner), passage)


def test_a_random_walk_of_handoffs_keeps_every_rule(seed):
    """Whatever becomes of whom, in whatever order: every answer is the model's, and all ends well."""
    walk = Walk(random.Random(seed))
    for _ in range(STEPS):
        walk.step()
    walk.twin.finish()
    seen = walk.twin.seen
    ways = [HandoffChoice.DIRECT, HandoffChoice.STAGED]
    missing = [(way, end) for way in ways for end in (*ENDS, HandoffState.EXPIRED) if not seen[way, end]]
    others = ("held", "bound", "left", "outlived", "let go", "arena full")
    missing += [each for each in (*others, *REFUSALS) if not seen[each]]
    assert not missing, "the walk led past what it is there to see"
