"""What the model knows of a KvState, what it predicts, and the rules that it holds the state to.

What the state evicts, the model learns from the tenants' histories: only an allocation, a purge or a
replacement removes a block, and never one that somebody may touch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvservice.core.effects import EndSession, LendSegment, Revoke
from kvservice.core.errors import Reason
from kvservice.core.history import FactKind
from kvservice.core.outcomes import ItemOutcome as Outcome
from kvservice.core.slot_pool import SlotState
from kvservice.core.slots import GRANULE_BYTES
from tests.core_world import LARGE_BYTES, SECOND_NS, SMALL_BYTES, Client, World, part, places_of

TENANTS = ("acme", "bolt")
ENGINES = (b"engine one......", b"engine two......")
SALTS = (b"", b"salt")
PARTS = (part(SMALL_BYTES), part(LARGE_BYTES, group=1), part(SMALL_BYTES - 100, group=2))
SETS = ((0,), (1,), (0, 1), (2, 0), (0, 1, 2))
"""Sets of parts that batches name."""
QUOTAS = (("bolt", 128 << 10),)
TTL_NS = 10 * SECOND_NS
SLOT_BYTES = (SMALL_BYTES, LARGE_BYTES, SMALL_BYTES)

Place = tuple[int, int]
"""(segment, granule) where a slot begins."""
NOWHERE: Place = (-1, -1)
EVICTS_ON_FAILURE = False
"""A refused batch of several parts still costs blocks (found_in_core.py); False once it does not."""


@dataclass
class Holder:
    """What the model knows of a reservation or lease."""

    client: Client
    engine: tuple[str, bytes]
    is_write: bool
    spaces: tuple[int, ...]
    numbers: list[int]
    places: list[Place]
    deadline_ns: int
    request_id: bytes = b""
    arrived: dict[int, int] = field(default_factory=dict)


@dataclass
class Person:
    """What the model knows of a session."""

    client: Client
    engine: tuple[str, bytes]
    is_local: bool
    heard_ns: int
    spaces: dict[tuple[bytes, int], int]


class Model:
    """Tables of dicts beside the state of a world."""

    def __init__(self, operations, *, check_every: int = 1) -> None:
        self.world = World(operations=operations, check_every=check_every, quotas_bytes=QUOTAS)
        self.people: dict[bytes, Person] = {}
        self.visible: dict[str, dict[tuple[int, int], Place]] = {tenant: {} for tenant in TENANTS}
        self.live: dict[int, Holder] = {}
        self.ended: dict[int, tuple[set[int], Holder]] = {}
        self.waiting: dict[int, tuple[set[bytes], Holder]] = {}
        self.transfers: dict[int, tuple[int, list[Place], list[int], bool]] = {}
        self.evicting: set[Place] = set()
        self.slot_bytes: dict[int, int] = {}
        self.namespaces: dict[tuple[str, bytes], bytes] = {}
        self.seen = dict.fromkeys(TENANTS, 0)
        self.told: Counter = Counter()
        self.tenant_of_segment: dict[int, str] = {}
        self.fenced: dict[Place, int] = {}
        self.refusals: Counter = Counter()

    # ---- what the model predicts

    def _reserve_outcome(self, person: Person, spaces, number: int) -> Outcome:
        outcome = self._lookup_outcome(person, spaces, number)
        return {Outcome.HIT: Outcome.ALREADY_COMMITTED, Outcome.MISS: Outcome.GRANTED}.get(outcome, outcome)

    def _lookup_outcome(self, person: Person, spaces, number: int) -> Outcome:
        mine = self.visible[person.engine[0]]
        if all((space, number) in mine for space in spaces):
            return Outcome.HIT
        for holder in self.live.values():
            if holder.is_write and number in holder.numbers and set(spaces) & set(holder.spaces):
                return Outcome.PENDING
        return Outcome.MISS

    def _commit_refusal(self, person: Person, reservation_id: int, sums: list[int]) -> set[Reason]:
        holder = self.live.get(reservation_id)
        if holder is not None:
            if holder.engine != person.engine:
                return {Reason.NOT_OWNER}
            if any(held == reservation_id for held, _, _, is_write in self.transfers.values() if is_write):
                return {Reason.INCOMPLETE_BLOCK}
            is_wrong = any(sums[index] != arrived for index, arrived in holder.arrived.items())
            return {Reason.CHECKSUM_MISMATCH} if is_wrong else set()
        outcomes, holder = self.ended[reservation_id]
        if holder.engine != person.engine:
            return {Reason.NOT_OWNER}
        reasons = {
            Outcome.ALREADY_EXPIRED: Reason.RESERVATION_EXPIRED,
            Outcome.ALREADY_ABORTED: Reason.RESERVATION_ABORTED,
        }
        return {reasons[Outcome(outcome)] for outcome in outcomes if outcome in reasons}

    def _past(self, person: Person, capability_id: int) -> set[int]:
        """Return the outcomes that a late call about something may get."""
        if capability_id in self.live or self.ended[capability_id][1].engine != person.engine:
            return {Outcome.UNKNOWN}
        outcomes = self.ended[capability_id][0]
        return {Outcome.ALREADY_COMMITTED if o == Outcome.DONE else o for o in outcomes}

    def _hear(self, person: Person) -> bool:
        """Note that a session is heard of now; False if it is dead."""
        self._expire()
        if person.client.token not in self.people:
            return False
        person.heard_ns = self.world.now_ns
        return True

    def _expire(self) -> None:
        """End what is due, as any event does before it is looked at."""
        now = self.world.now_ns
        silent = [p for p in self.people.values() if not p.is_local and p.heard_ns + TTL_NS <= now]
        mute = {person.client.token for person in silent}
        for capability_id, holder in list(self.live.items()):
            if holder.deadline_ns <= now:
                outcomes = {Outcome.ALREADY_EXPIRED}
                if holder.is_write and holder.client.token in mute:
                    outcomes.add(Outcome.ALREADY_ABORTED)  # whichever the state looks at first
                self._end(capability_id, outcomes, self._processes(holder.engine))
        for person in silent:
            self._end_session(person)

    def _end_session(self, person: Person) -> None:
        del self.people[person.client.token]
        self.told[EndSession, person.client.token] += 1
        for capability_id, holder in list(self.live.items()):
            if holder.client is person.client:
                outcome = Outcome.ALREADY_ABORTED if holder.is_write else Outcome.ALREADY_EXPIRED
                self._end(capability_id, {outcome}, self._processes(holder.engine))
        for capability_id in list(self.waiting):
            self._let_go(capability_id, person.client.token)

    def _processes(self, engine: tuple[str, bytes]) -> set[bytes]:
        return {token for token, p in self.people.items() if p.is_local and p.engine == engine}

    def _end(self, capability_id: int, outcomes: set[int], asked: set[bytes] | None) -> None:
        """End a capability; `asked` must let go of its memory first (None: the engine's own word)."""
        holder = self._drop(capability_id, outcomes)
        if asked:
            self.waiting[capability_id] = (set(asked), holder)
            self.told.update((Revoke, token, capability_id) for token in asked)
        else:
            self._free(holder.places)

    def _drop(self, capability_id: int, outcomes: set[int]) -> Holder:
        holder = self.live.pop(capability_id)
        self.ended[capability_id] = (outcomes, holder)
        return holder

    def _let_go(self, capability_id: int, token: bytes) -> None:
        tokens, holder = self.waiting[capability_id]
        tokens.discard(token)
        if not tokens:
            del self.waiting[capability_id]
            self._free(holder.places)

    def _free(self, places: list[Place]) -> None:
        self.evicting -= set(places) - self._pinned()

    def _leased(self, person: Person, spaces, numbers: list[int], answer, ttl_ns: int) -> int:
        mine = self.visible[person.engine[0]]
        places = [mine[space, number] for number in numbers for space in spaces]
        assert answer.keys_count == len(numbers)
        assert places_of(answer.slots) == places
        deadline = self.world.now_ns + (ttl_ns or TTL_NS)
        assert answer.remaining_ns == deadline - self.world.now_ns
        self.live[answer.lease_id] = Holder(
            person.client, person.engine, False, spaces, numbers, places, deadline
        )
        return answer.lease_id

    # ---- what the model holds the state to

    def _pinned(self) -> set[Place]:
        """Places of blocks that somebody may touch."""
        pinned = {place for _, places, _, _ in self.transfers.values() for place in places}
        for holder in (*self.live.values(), *(holder for _, holder in self.waiting.values())):
            pinned.update(holder.places)
        return pinned

    def _held(self) -> set[Place]:
        """Places of every slot that is not free."""
        shown = {place for mine in self.visible.values() for place in mine.values()}
        return shown | self._pinned() | self.evicting

    def _settle(self, *, may_remove=False, replaced=None, purged=frozenset()) -> set[Place]:
        """Apply what the histories say, and return the places of what was removed.

        replaced: spaces and numbers of a commit. purged: spaces of a purge.
        """
        removed: set[Place] = set()
        for tenant, mine in self.visible.items():
            for fact in self.world.facts(tenant, after=self.seen[tenant]):
                self.seen[tenant] = fact.sequence
                packed = [fact.keys[i : i + 32] for i in range(0, len(fact.keys), 32)]
                numbers = [int.from_bytes(each[:8], "big") for each in packed]
                if fact.kind == FactKind.COMMITTED:
                    assert replaced is not None, "a commit that nobody asked for"
                    assert fact.space_id in replaced[0]
                    assert set(numbers) == replaced[1]
                    mine.update({(fact.space_id, number): NOWHERE for number in numbers})
                elif fact.kind == FactKind.REMOVED:
                    is_asked = fact.space_id in purged or (replaced and fact.space_id in replaced[0])
                    assert may_remove or is_asked, "a block went without a reason"
                    gone = {mine.pop((fact.space_id, number)) for number in numbers}
                    assert is_asked or not gone & self._pinned(), "somebody may touch an evicted block"
                    removed |= gone
        self.evicting |= removed & self._pinned() if removed else removed
        self._hear_effects()
        return removed

    def _hear_effects(self) -> None:
        """Compare what the state told the world with what it had to."""
        effects, self.world.effects = self.world.effects, []
        for effect in effects:
            if isinstance(effect, LendSegment):
                is_new = effect.segment not in self.tenant_of_segment
                owner = self.tenant_of_segment.setdefault(effect.segment, effect.tenant)
                assert owner == effect.tenant, "a tenant may have mapped what another one gets"
                assert effect.is_fresh == (is_new and effect.segment >= self.world.limits.segments_count)
            elif isinstance(effect, Revoke):
                self.told[Revoke, effect.token, effect.capability_id] -= 1
            elif isinstance(effect, EndSession):
                self.told[EndSession, effect.token] -= 1
        assert all(count >= 0 for count in self.told.values()), "told twice, or for no reason"
        self.told = +self.told

    def _check_fresh(self, spaces, slots, held: set[Place]) -> None:
        """No byte of a granted slot is anybody else's, and stale holders can tell."""
        taken: dict[int, set[int]] = {}
        widths = self._widths()
        for segment, granule in held:
            span = range(granule, granule + widths[segment])
            taken.setdefault(segment, set()).update(span)
        for index, (segment, granule) in enumerate(places_of(slots)):
            span = set(
                range(granule, granule + self.slot_bytes[spaces[index % len(spaces)]] // GRANULE_BYTES)
            )
            assert not span & taken.setdefault(segment, set()), "a slot is given to two"
            taken[segment] |= span
            generation = int(slots.generations[index])
            shown = self.world.memory.pages[segment]
            assert int(shown[granule]) == generation
            for at in span & {granule for where, granule in self.fenced if where == segment}:
                assert int(shown[at]) > self.fenced[segment, at], "a stale capability looks fresh"
            self.fenced[segment, granule] = generation

    def _widths(self) -> dict[int, int]:
        """Return granules of each slot by segment."""
        return {number: pool.slot_granules for number, pool in self.world.books.lent.items()}

    def _evictable_bytes(self, tenant: str) -> dict[int, int]:
        """Return what the tenant's pools can surely give for each slot size."""
        pools = self.world.books.tenant(tenant).pools
        return {size: pool.free_count + int(pool.evictable().sum()) for size, pool in pools.items()}

    def _check_refused(
        self, error, person, spaces, wanted, budget, *, kept_bytes: int, is_again: bool
    ) -> None:
        """A refusal is right, and cost nobody a block."""
        self.refusals[error.reason] += 1
        if is_again:
            assert error.reason is Reason.REQUEST_ID_REUSED
        else:
            assert error.reason in {Reason.ARENA_FULL, Reason.QUOTA_EXCEEDED}
            assert wanted
            sizes = [self.slot_bytes[space] for space in spaces]
            if error.reason is Reason.ARENA_FULL and len(sizes) == 1:
                assert budget.get(sizes[0], 0) < wanted, "there was room"
            quota = dict(QUOTAS).get(person.engine[0], self.world.limits.arena_bytes)
            if error.reason is Reason.QUOTA_EXCEEDED:
                pinned = sum(
                    int(((p.state != SlotState.FREE) & (p.state != SlotState.ABSENT) & ~p.evictable()).sum())
                    * p.slot_bytes
                    for p in self.world.books.tenant(person.engine[0]).pools.values()
                )
                assert pinned + kept_bytes + wanted * sum(sizes) > quota, "the quota had room"
        self._settle(may_remove=EVICTS_ON_FAILURE and len(spaces) > 1)

    def check_blocks(self) -> None:
        """The model's slots are the state's, and nothing was left untold."""
        assert not self.told, "somebody was not told"
        widths = self._widths()
        charged = dict.fromkeys(TENANTS, 0)
        for segment, _ in self._held():
            charged[self.tenant_of_segment[segment]] += widths[segment] * GRANULE_BYTES
        for tenant in TENANTS:
            assert charged[tenant] == self.world.books.tenant(tenant).charged_bytes()
