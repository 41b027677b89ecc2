"""A KvState next to a model of who may be reading what: each verb does the same to both, and compares.

The model knows nothing of holds: it follows the processes that may be reading the memory of a handoff,
and holds the state to them at every step. What is in the arena may outlive who offered it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvservice.core.effects import Revoke, Tell
from kvservice.core.errors import (
    ArenaFullError,
    HandoffClaimedError,
    HandoffEndedError,
    HandoffUnknownError,
    KvError,
    NotOwnerError,
    NoWayError,
    RepresentationMismatchError,
    SegmentInUseError,
    SegmentUnknownError,
    SessionUnknownError,
)
from kvservice.core.handoff_choice import HandoffChoice, HandoffPolicy
from kvservice.core.outcomes import ItemOutcome
from kvservice.core.records import HandoffState
from tests.core_world import LARGE_BYTES, SECOND_NS, SMALL_BYTES, Client, World, places_of

TTL_NS, SILENCE_NS, HOLD_NS, BOUND_NS = (seconds * SECOND_NS for seconds in (10, 7, 25, 3))
TENANTS = ("acme", "bolt")
ENGINES = (b"engine one......", b"engine two......", b"engine three....")
SETS = ((0,), (0, 1))
"""Sets of parts that are handed over together."""
TRANSPORTS = (("ucx",), ("tcp",), ("ucx", "tcp"))
REMEMBERED = 30
ENDS = (HandoffState.COMPLETED, HandoffState.REJECTED, HandoffState.ABORTED)
ABORTED, EXPIRED = HandoffState.ABORTED, HandoffState.EXPIRED
LATE = {
    HandoffState.COMPLETED: ItemOutcome.ALREADY_COMPLETED,
    HandoffState.REJECTED: ItemOutcome.ALREADY_REJECTED,
    HandoffState.ABORTED: ItemOutcome.ALREADY_ABORTED,
    HandoffState.EXPIRED: ItemOutcome.ALREADY_EXPIRED,
}


@dataclass(eq=False)
class Person:
    """What the model knows of a session. layouts: of its own memory, with the transports to it."""

    client: Client
    engine: tuple[str, bytes]
    is_local: bool
    heard_ns: int
    spaces: tuple[int, ...]
    layouts: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()
    transports: frozenset[str] = frozenset()


@dataclass(eq=False)
class Passage:
    """What the model knows of a handoff.

    layouts, transports: of the memory that it is offered from, and the ways there; gone if that is.
    slots: its blocks in the arena, if they are pinned there.
    readers: processes of the claimer's engine that may be reading the memory it came from: all that
        lived since the claim and have neither been seen to die nor let go.
    waiting: processes that have not let go of the lease, after the end of a claim through the arena.
    is_lease_released: by the word of the claimer's engine, before the end.
    ends: states of which it has one, once it has ended.
    """

    handoff_id: int
    owner: Person
    offered: dict
    layouts: tuple[int, ...]
    transports: frozenset[str]
    slots: object
    deadline_ns: int
    hold_until_ns: int
    claimer: Person | None = None
    is_direct: bool = False
    lease_id: int = 0
    is_lease_released: bool = False
    readers: set[bytes] = field(default_factory=set)
    waiting: set[bytes] = field(default_factory=set)
    ends: set[HandoffState] = field(default_factory=set)
    ended_ns: int = 0
    is_released: bool = False
    is_noticed: bool = False
    told: object = None

    @property
    def is_claimed_directly(self) -> bool:
        """Whether somebody reads the memory that it came from."""
        return self.claimer is not None and self.is_direct

    @property
    def is_in_arena(self) -> bool:
        """Whether it needs nothing of who offered it."""
        return self.slots is not None if self.claimer is None else not self.is_direct

    @property
    def is_clear(self) -> bool:
        """Whether nobody can be reading the memory it was offered from."""
        if self.ends:
            return self.is_released
        return not self.layouts if self.claimer is None else not self.is_direct

    @property
    def is_news(self) -> bool:
        """Whether there is something to tell its owner."""
        is_left = self.layouts != self.offered["layouts"]
        return is_left or self.claimer is not None or bool(self.ends)


class HandoffTwin:
    """The state and its model."""

    def __init__(self, *, check_every: int = 1) -> None:
        self.world = World(
            check_every=check_every,
            segments_count=2,
            default_ttl_ns=TTL_NS,
            heartbeat_timeout_ns=SILENCE_NS,
            handoff_hold_ns=HOLD_NS,
            operation_bound_ns=BOUND_NS,
        )
        self.people: dict[bytes, Person] = {}
        self.passages: list[Passage] = []
        self.seen: Counter = Counter()
        self._asked: set[tuple[bytes, int]] = set()
        self._mute: set[bytes] = set()
        self._namespaces: dict[str, bytes] = {}

    # ---- sessions, memory and blocks

    def attach(self, tenant: str, engine: bytes, *, is_local: bool) -> Person:
        """Open a session; it may read what its engine has claimed before."""
        self._expire()
        client = self.world.attach(tenant, engine=engine, is_local=is_local)
        opened = client.open_answer(SMALL_BYTES, LARGE_BYTES)
        self._namespaces[tenant] = opened.namespace_id
        person = Person(client, (tenant, engine), is_local, self.world.now_ns, opened.space_ids)
        self.people[client.token] = person
        for passage in self._live():
            if passage.is_claimed_directly and passage.claimer.engine == person.engine:
                passage.readers.add(client.token)
        self._settle()
        return person

    def leave(self, person: Person) -> None:
        """See a process die, or have it say good-bye."""
        self._expire()
        if person.client.token in self.people:
            self._end_session(person, is_seen=True)
        person.client.leave()
        self._settle()

    def advance(self, nanoseconds: int) -> None:
        """Let time pass."""
        self.world.now_ns += nanoseconds
        self._expire()
        self._settle()

    def register(self, person: Person, transports: tuple[str, ...]) -> None:
        """Make memory known, a pool for each part."""
        if not person.layouts and self._hear(person):
            answer = person.client.register_pools(SMALL_BYTES, LARGE_BYTES, transports=transports)
            person.layouts, person.segments = answer.layout_ids, answer.segment_ids
            person.transports = frozenset(transports)
        self._settle()

    def unregister(self, person: Person) -> None:
        """Forget it: refused while anybody may be reading it."""
        if not self._hear(person):
            return
        touched = [p for p in self.passages if set(p.offered["layouts"]) & set(person.layouts)]
        if any(p.is_claimed_directly and not p.is_released for p in touched):
            self._refused(SegmentInUseError, person.client.unregister, *person.segments)
        else:
            assert person.client.unregister(*person.segments) == len(person.segments)
            for passage in touched:
                if not passage.ends and passage.is_in_arena:
                    self._leave(passage)
                elif not passage.ends:
                    self._end(passage, {ABORTED}, is_by_word=True)
            person.layouts, person.segments = (), ()
        self._settle()

    def put(self, person: Person, parts: tuple[int, ...], numbers: list[int]) -> None:
        """Store blocks; others are evicted for them."""
        if self._hear(person):
            spaces = [person.spaces[each] for each in parts]
            try:
                reservation = person.client.reserve(spaces, numbers)
            except ArenaFullError:
                self.seen["arena full"] += 1
            else:
                if reservation.reservation_id:
                    person.client.commit(reservation)
        self._settle()

    def purge(self, person: Person) -> None:
        """Make every block of the tenant invisible."""
        if self._hear(person):
            person.client.purge(self._namespaces[person.engine[0]])
        self._settle()

    # ---- handoffs

    def offer(
        self, person: Person, parts, numbers, *, giver: Person | None, policy=HandoffPolicy.ANY, ttl_s=0
    ) -> Passage | None:
        """Offer blocks, out of the memory of `giver` if there is one."""
        if not self._hear(person):
            return None
        spaces = tuple(person.spaces[each] for each in parts)
        located = person.client.lookup(spaces, numbers, locate=True)
        is_stored = located.prefix_count == len(numbers) and policy is not HandoffPolicy.DIRECT
        layouts = giver.layouts[: len(parts)] if giver is not None else ()
        offered = {
            "spaces": spaces,
            "numbers": numbers,
            "layouts": layouts,
            "policy": policy,
            "ttl_s": ttl_s,
            "request_id": self.world.fresh(),
        }
        is_ours = not layouts or (giver.engine == person.engine and giver.client.token in self.people)
        if not is_ours:
            return self._refused(SegmentUnknownError, person.client.offer, **offered)
        transports = giver.transports if layouts and policy is not HandoffPolicy.STAGED else frozenset()
        if not transports and not is_stored:
            return self._refused(NoWayError, person.client.offer, **offered)
        answer = person.client.offer(**offered)
        now = self.world.now_ns
        passage = Passage(
            answer.handoff_id,
            person,
            offered,
            layouts,
            transports,
            located.slots if is_stored else None,
            now + min(ttl_s * SECOND_NS or TTL_NS, HOLD_NS),
            now + HOLD_NS,
        )
        assert answer.remaining_ns == passage.deadline_ns - now
        assert answer.hold_ns == HOLD_NS + BOUND_NS
        self.passages = [each for each in self.passages if not self._is_past(each)] + [passage]
        self._settle()
        return passage

    def offer_again(self, person: Person, passage: Passage) -> None:
        """Retry an offer, by any process of the engine, whatever has become of the first but its death."""
        self._expire()
        is_there = not passage.ends and passage.owner.client.token in self.people
        if not is_there or person.engine != passage.owner.engine or not self._hear(person):
            return
        answer = person.client.offer(**passage.offered)
        assert answer.handoff_id == passage.handoff_id
        assert answer.remaining_ns == passage.deadline_ns - self.world.now_ns
        self._settle()

    def claim(
        self, person: Person, passage: Passage, transports: tuple[str, ...], *, is_wrong: bool = False
    ) -> None:
        """Claim a handoff, with other spaces than those offered if that is wanted."""
        if not self._hear(person):
            return
        count = len(passage.offered["spaces"])
        spaces = person.spaces[: 3 - count if is_wrong else count]
        arguments = (passage.handoff_id, spaces)
        refusal = self._claim_refusal(person, passage, frozenset(transports), is_wrong=is_wrong)
        if refusal is not None:
            self._refused(refusal, person.client.claim, *arguments, transports=transports)
            return
        answer = person.client.claim(*arguments, transports=transports)
        if passage.claimer is None:
            self._take(person, passage, frozenset(transports))
        assert passage.claimer is person, "a handoff was claimed twice"
        assert answer.decision.choice == self._choice(passage)
        assert answer.remaining_ns == passage.deadline_ns - self.world.now_ns
        if passage.is_direct:
            assert [layout.layout_id for layout in answer.layouts] == list(passage.offered["layouts"])
        else:
            passage.lease_id = passage.lease_id or answer.lease.lease_id
            assert answer.lease.lease_id == passage.lease_id
            assert answer.lease.remaining_ns == answer.remaining_ns
            assert places_of(answer.lease.slots) == places_of(passage.slots)
            assert answer.lease.slots.generations.tolist() == passage.slots.generations.tolist()
        self._settle()

    def release(self, person: Person, passage: Passage) -> None:
        """Release the lease of a claim through the arena, of one's own engine or of another's."""
        if not passage.lease_id or not self._hear(person):
            return
        (outcome,) = person.client.release(passage.lease_id)
        if passage.claimer.engine != person.engine:
            assert outcome == ItemOutcome.UNKNOWN
        elif passage.is_lease_released:
            assert outcome == ItemOutcome.ALREADY_RELEASED
        elif passage.ends:
            assert outcome in {ItemOutcome.ALREADY_RELEASED, ItemOutcome.ALREADY_EXPIRED}
        else:
            assert outcome == ItemOutcome.DONE
            passage.is_lease_released = True
        self._settle()

    def end(self, person: Person, passage: Passage, how: HandoffState) -> None:
        """End a handoff, in time or late, by somebody who may or may not."""
        if not self._hear(person):
            return
        is_claimers = passage.claimer is not None and passage.claimer.engine == person.engine
        is_theirs = person.engine[0] == passage.owner.engine[0]
        may = {
            HandoffState.COMPLETED: is_claimers,
            HandoffState.REJECTED: is_claimers or passage.claimer is None,
            HandoffState.ABORTED: is_claimers or person.engine == passage.owner.engine,
        }
        if is_theirs and not passage.ends and not may[how]:
            self._refused(NotOwnerError, person.client.end_handoff, passage.handoff_id, how)
            return
        outcome = person.client.end_handoff(passage.handoff_id, how)
        if not is_theirs:
            assert outcome == ItemOutcome.UNKNOWN
        elif passage.ends:
            assert outcome in {LATE[state] for state in passage.ends}
            passage.readers.discard(person.client.token)
        else:
            assert outcome == ItemOutcome.DONE
            self._end(passage, {how}, is_by_word=is_claimers)
        self._settle()

    def beat(self, person: Person, *, renew=(), is_letting_go=True, noticed=()) -> None:
        """Renew, let go of what has ended (or not), and take notice."""
        if not self._hear(person):
            return
        token, now = person.client.token, self.world.now_ns
        # Letting go of what has not ended says nothing.
        acknowledged = [*self._owed(token), *(p.handoff_id for p in renew)] if is_letting_go else []
        answer = person.client.beat(
            handoffs=[p.handoff_id for p in renew],
            noticed=[p.handoff_id for p in noticed],
            acknowledged=acknowledged,
        )
        for passage in self.passages:
            if is_letting_go and passage.ends:
                passage.readers.discard(token)
                passage.waiting.discard(token)
            passage.is_released = passage.is_released or bool(passage.ends and not passage.readers)
        for passage in noticed:
            if passage.owner is person and passage.ends and passage.is_released:
                passage.is_noticed = True
        left = [self._renewed(person, p, o) for p, o in zip(renew, answer.handoff_outcomes, strict=True)]
        assert answer.renewal.remaining_ns == min([TTL_NS, *(at - now for at in left if at is not None)])
        assert answer.revoked_ids.tolist() == self._owed(token)
        expected = {p.handoff_id: p for p in self.passages if p.owner is person and not p.is_noticed}
        given = {notice.handoff_id: notice for notice in answer.notices}
        assert given.keys() == {i for i, p in expected.items() if p.is_news}
        for handoff_id, notice in given.items():
            self._check_notice(expected[handoff_id], notice)
        self._settle()

    def look(self, person: Person, passage: Passage) -> None:
        """Ask what became of a handoff."""
        if not self._hear(person):
            return
        if person.engine[0] != passage.owner.engine[0]:
            self._refused(HandoffUnknownError, person.client.look, passage.handoff_id)
            return
        answer = person.client.look(passage.handoff_id)
        states = passage.ends or {HandoffState.OFFERED if passage.claimer is None else HandoffState.CLAIMED}
        assert answer.state in states
        assert answer.is_released == passage.is_clear
        assert answer.choice == self._choice(passage)
        self._settle()

    def finish(self) -> None:
        """Let everything that has a bound reach it: what has ended is released, and both sides know."""
        for _ in range(2 * (HOLD_NS + BOUND_NS) // SILENCE_NS + 2):
            for person in list(self.people.values()):
                self.beat(person, is_letting_go=False)
            self.advance(SILENCE_NS - 1)
        assert not self._live()
        assert not self.world.books.handoffs
        assert not self.world.books.handoff_requests
        assert not self.world.books.holds
        for person in list(self.people.values()):
            mine = [passage for passage in self.passages if passage.owner is person]
            assert all(passage.is_released for passage in mine)
            self.beat(person, renew=[p for p in self.passages if p.claimer is person], noticed=mine)
            assert person.client.beat().notices == ()
        assert not self.world.books.leases
        assert not any(p.pins.any() for t in self.world.books.tenants.values() for p in t.pools.values())

    # ---- the model

    def _live(self) -> list[Passage]:
        return [passage for passage in self.passages if not passage.ends]

    def _is_past(self, passage: Passage) -> bool:
        """Whether there is nothing more to come of a handoff; some are kept, for those who come late."""
        is_told = passage.is_noticed or passage.owner.client.token not in self.people
        is_over = passage.is_released and is_told and not passage.waiting
        return is_over and len(self.passages) > REMEMBERED

    def _hear(self, person: Person) -> bool:
        """Note that a session is heard of now; False, and a refusal, if it is dead."""
        self._expire()
        if person.client.token not in self.people:
            self._refused(SessionUnknownError, person.client.beat)
            return False
        person.heard_ns = self.world.now_ns
        return True

    def _refused(self, error: type[KvError], verb, *arguments, **options) -> None:
        """A refusal is the right one."""
        with pytest.raises(error):
            verb(*arguments, **options)
        self.seen[error.__name__] += 1
        self._settle()

    def _expire(self) -> None:
        """End what is due, as any event does before it is looked at."""
        now = self.world.now_ns
        silent = [p for p in self.people.values() if not p.is_local and p.heard_ns + SILENCE_NS <= now]
        self._mute = {person.client.token for person in silent}
        # Of what is due at once, either may come first.
        due = {passage for passage in self._live() if passage.deadline_ns <= now}
        for passage in due:
            is_alone = any(self._needs(passage, person) for person in silent)
            self._end(passage, {EXPIRED, ABORTED} if is_alone else {EXPIRED}, is_by_word=False)
        for person in silent:
            self._end_session(person, is_seen=False)

    def _end_session(self, person: Person, *, is_seen: bool) -> None:
        token = person.client.token
        del self.people[token]
        if is_seen:
            for passage in self.passages:
                passage.readers.discard(token)
                passage.waiting.discard(token)
        for passage in self._live():
            if self._needs(passage, person):
                self._end(passage, {ABORTED}, is_by_word=False)
            elif passage.owner is person or set(passage.layouts) & set(person.layouts):
                self.seen["outlived"] += passage.owner is person
                self._leave(passage)

    def _needs(self, passage: Passage, person: Person) -> bool:
        """Whether the death of somebody ends a handoff."""
        is_giver = passage.owner is person or bool(set(passage.layouts) & set(person.layouts))
        return passage.claimer is person or (is_giver and not passage.is_in_arena)

    def _leave(self, passage: Passage) -> None:
        """Have a handoff go on without the memory that it was offered from."""
        self.seen["left"] += bool(passage.layouts)
        passage.layouts, passage.transports = (), frozenset()

    def _end(self, passage: Passage, states: set[HandoffState], *, is_by_word: bool) -> None:
        """End a handoff. is_by_word: of the claimer, that nobody of its engine reads any more."""
        passage.ends, passage.ended_ns = set(states), self.world.now_ns
        if is_by_word:
            passage.readers.clear()
        elif passage.lease_id and not passage.is_lease_released:
            engine = passage.claimer.engine
            passage.waiting = {t for t, p in self.people.items() if p.is_local and p.engine == engine}
            self._asked.update((token, passage.lease_id) for token in passage.waiting)
        self._asked.update((t, passage.handoff_id) for t in passage.readers & self.people.keys())
        passage.is_released = not passage.readers
        self.seen[(self._choice(passage), *sorted(states))] += 1
        self.seen["held"] += not passage.is_released
        self.seen["let go"] += passage.is_lease_released

    def _claim_refusal(
        self, person: Person, passage: Passage, transports: frozenset[str], *, is_wrong: bool
    ) -> type[KvError] | None:
        if person.engine[0] != passage.owner.engine[0]:
            return HandoffUnknownError
        if passage.ends:
            return HandoffEndedError
        if passage.claimer not in {None, person}:
            return HandoffClaimedError
        if is_wrong:
            return RepresentationMismatchError
        if passage.is_lease_released:
            return HandoffEndedError
        if passage.claimer is None and passage.slots is None and not passage.transports & transports:
            return NoWayError
        return None

    def _take(self, person: Person, passage: Passage, transports: frozenset[str]) -> None:
        ways = passage.transports & transports
        # Shared memory is the fastest; one-sided reads are faster than sockets.
        is_faster = not person.is_local and "ucx" in ways
        passage.claimer, passage.is_direct = person, bool(ways) and (passage.slots is None or is_faster)
        now = self.world.now_ns
        passage.deadline_ns = max(passage.deadline_ns, min(now + TTL_NS, passage.hold_until_ns))
        if passage.is_direct:
            passage.readers = {t for t, p in self.people.items() if p.engine == person.engine}

    def _renewed(self, person: Person, passage: Passage, outcome: int) -> int | None:
        """Hold the outcome of a renewal to the model; return the deadline of what lives."""
        if passage.owner.engine[0] != person.engine[0]:
            assert outcome == ItemOutcome.UNKNOWN
        elif passage.ends:
            assert outcome in {LATE[state] for state in passage.ends}
        elif passage.claimer is None or passage.claimer.engine != person.engine:
            assert outcome == ItemOutcome.UNKNOWN
        else:
            assert outcome == ItemOutcome.DONE
            asked = min(self.world.now_ns + TTL_NS, passage.hold_until_ns)
            passage.deadline_ns = max(passage.deadline_ns, asked)
            return passage.deadline_ns
        return None

    def _choice(self, passage: Passage) -> HandoffChoice:
        if passage.claimer is None:
            return HandoffChoice.UNDECIDED
        return HandoffChoice.DIRECT if passage.is_direct else HandoffChoice.STAGED

    def _owed(self, token: bytes) -> list[int]:
        """Return what a process has been asked to let go of, and has not."""
        held = [p.handoff_id for p in self.passages if p.ends and not p.is_released and token in p.readers]
        return sorted([*held, *(p.lease_id for p in self.passages if token in p.waiting)])

    # ---- what the model holds the state to

    def _check_notice(self, passage: Passage, notice) -> None:
        """What an owner is told is true."""
        if passage.ends:
            assert notice.state in passage.ends
            assert notice.is_released == passage.is_released
        else:
            is_claimed = passage.claimer is not None
            assert notice.state == (HandoffState.CLAIMED if is_claimed else HandoffState.OFFERED)
            assert notice.is_released == passage.is_clear

    def _settle(self) -> None:
        """Hear what the state says, and compare what it holds with who may be reading."""
        self.world.advance(0)
        now, held = self.world.now_ns, self.world.books.holds
        by_id = {passage.handoff_id: passage for passage in self.passages}
        for passage in self.passages:
            if not passage.ends or passage.is_released:
                assert passage.handoff_id not in held
            elif passage.handoff_id in held:
                assert passage.readers, "nobody can be reading, and the memory is held"
                assert now < max(passage.ended_ns, passage.deadline_ns) + BOUND_NS, "held for too long"
            else:
                is_over = now >= passage.deadline_ns + BOUND_NS
                assert not passage.readers or is_over, "somebody may be reading what is released"
                self.seen["bound"] += bool(passage.readers)
                passage.is_released = True
        asked = set()
        for effect in self.world.effects:
            if isinstance(effect, Tell):
                passage = by_id[effect.notice.handoff_id]
                assert effect.token == passage.owner.client.token
                assert passage.is_released or not effect.notice.is_released or not passage.is_direct
                passage.told = effect.notice
            elif isinstance(effect, Revoke):
                asked.add((effect.token, effect.capability_id))
        self.world.effects.clear()
        assert {each for each in asked ^ self._asked if each[0] not in self._mute} == set()
        self._asked.clear()
        for passage in self.passages:
            if passage.owner.client.token in self.people and passage.is_news:
                self._check_notice(passage, passage.told)
            is_pinned = passage.waiting or (not passage.ends and passage.is_in_arena)
            if passage.slots is not None and is_pinned and not passage.is_lease_released:
                pages, places = self.world.memory.pages, places_of(passage.slots)
                shown = [int(pages[segment][granule]) for segment, granule in places]
                assert shown == passage.slots.generations.tolist(), "what is handed over was given up"
