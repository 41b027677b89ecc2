"""A KvState next to a model of dicts: each verb does the same to both, and compares every answer."""

from __future__ import annotations

from kvservice.core.effects import EndSession
from kvservice.core.errors import KvError, Reason
from kvservice.core.outcomes import ItemOutcome as Outcome
from tests.core_world import SECOND_NS, places_of
from tests.property.model import (
    NOWHERE,
    PARTS,
    SALTS,
    SLOT_BYTES,
    TTL_NS,
    Holder,
    Model,
    Person,
)


def attempt(call, *arguments):
    """Return the answer and None, or None and the reason of the refusal."""
    try:
        return call(*arguments), None
    except KvError as error:
        return None, error.reason


class Twin(Model):
    """The state and its model."""

    # ---- sessions

    def attach(self, tenant: str, engine: bytes, *, is_local: bool) -> Person:
        """Open a session and both namespaces in it."""
        self._expire()
        client = self.world.attach(tenant, engine=engine, is_local=is_local)
        person = Person(client, (tenant, engine), is_local, self.world.now_ns, {})
        self.people[client.token] = person
        for salt in SALTS:
            answer = client.open_answer(*PARTS, salt=salt)
            assert self.namespaces.setdefault((tenant, salt), answer.namespace_id) == answer.namespace_id
            for index, space in enumerate(answer.space_ids):
                person.spaces[salt, index] = space
                self.slot_bytes[space] = SLOT_BYTES[index]
        self._settle()
        return person

    def resume(self, person: Person) -> None:
        """Come back after a lost connection: the same session, heard of again."""
        self._expire()
        tenant, engine = person.engine
        is_alive = person.client.token in self.people
        client = self.world.attach(
            tenant, engine=engine, is_local=person.is_local, resume=person.client.token
        )
        assert client.is_resumed == is_alive
        if is_alive:
            person.heard_ns = self.world.now_ns
        else:
            client.leave()
            self.told[EndSession, client.token] += 1
        self._settle()

    def leave(self, person: Person) -> None:
        """End a session, dead or alive."""
        self._expire()
        if person.client.token in self.people:
            self._end_session(person)
        person.client.leave()
        self._settle()

    def advance(self, nanoseconds: int) -> None:
        """Let time pass."""
        self.world.now_ns += nanoseconds
        self._expire()
        self.world.advance(0)
        self._settle()

    # ---- blocks

    def reserve(self, person: Person, salt: bytes, parts, numbers: list[int], *, ttl_ns=0, request=b""):
        """Reserve keys; return the id, or None where nothing was granted."""
        if not self._hear(person):
            return None
        spaces = tuple(person.spaces[salt, each] for each in parts)
        request = request or self.world.fresh()
        known = [h for h in self.live.items() if h[1].is_write and h[1].request_id == request]
        expected = [self._reserve_outcome(person, spaces, number) for number in numbers]
        wanted = expected.count(Outcome.GRANTED)
        held, budget = self._held(), self._evictable_bytes(person.engine[0])
        # What the answer calls committed is not given up for the rest of the same request.
        pinned, visible = self._pinned(), self.visible[person.engine[0]]
        kept_bytes = 0
        for number, outcome in zip(numbers, expected, strict=True):
            for space in spaces if outcome == Outcome.ALREADY_COMMITTED else ():
                is_kept = visible[space, number] not in pinned
                budget[self.slot_bytes[space]] -= is_kept
                kept_bytes += is_kept * self.slot_bytes[space]
        try:
            answer = person.client.reserve(spaces, numbers, request_id=request, ttl_s=ttl_ns / SECOND_NS)
        except KvError as error:
            self._check_refused(
                error, person, spaces, wanted, budget, kept_bytes=kept_bytes, is_again=bool(known)
            )
            return None
        if known:
            assert [answer.reservation_id, places_of(answer.slots)] == [known[0][0], known[0][1].places]
            self._settle()
            return answer.reservation_id
        assert answer.outcomes.tolist() == expected
        assert len(answer.slots) == wanted * len(spaces)
        removed = self._settle(may_remove=True)
        if not wanted:
            assert answer.reservation_id == 0
            return None
        places = places_of(answer.slots)
        self._check_fresh(spaces, answer.slots, held - removed)
        granted = [n for n, outcome in zip(numbers, expected, strict=True) if outcome == Outcome.GRANTED]
        deadline = self.world.now_ns + (ttl_ns or TTL_NS)
        assert answer.remaining_ns == deadline - self.world.now_ns
        self.live[answer.reservation_id] = Holder(
            person.client, person.engine, True, spaces, granted, places, deadline, request
        )
        return answer.reservation_id

    def commit(self, person: Person, reservation_id: int, *, is_honest: bool = True) -> None:
        """Commit a reservation, live or ended, of this engine or another."""
        if not self._hear(person):
            return
        holder = self.live.get(reservation_id) or self.ended[reservation_id][1]
        sums = [holder.arrived.get(i, i) + (not is_honest) for i in range(len(holder.places))]
        expected = self._commit_refusal(person, reservation_id, sums)
        answer, refusal = attempt(person.client.commit_id, reservation_id, sums)
        if expected:
            assert refusal in expected
            self._settle()
            return
        if reservation_id in self.live:
            self._drop(reservation_id, {Outcome.DONE})
            self._settle(replaced=(holder.spaces, set(holder.numbers)))
            width = len(holder.spaces)
            for index, place in enumerate(holder.places):
                where = (holder.spaces[index % width], holder.numbers[index // width])
                assert self.visible[person.engine[0]][where] == NOWHERE
                self.visible[person.engine[0]][where] = place
        self._settle()
        assert (answer.outcome, answer.keys_count) == (Outcome.DONE, len(holder.numbers))

    def abort(self, person: Person, reservation_id: int) -> None:
        """Abort a reservation, live or ended, of this engine or another."""
        if not self._hear(person):
            return
        holder = self.live.get(reservation_id)
        outcome, refusal = attempt(person.client.abort, reservation_id)
        if holder is None:
            assert outcome in self._past(person, reservation_id)
        elif holder.engine != person.engine:
            assert refusal is Reason.NOT_OWNER
        else:
            assert outcome is Outcome.DONE
            self._end(reservation_id, {Outcome.ALREADY_ABORTED}, None)
        self._settle()

    def lookup(self, person: Person, salt: bytes, parts, numbers: list[int], *, ttl_ns=None):
        """Look keys up, with a lease where a life is given; return the lease's id or None."""
        if not self._hear(person):
            return None
        spaces = tuple(person.spaces[salt, each] for each in parts)
        expected = [self._lookup_outcome(person, spaces, number) for number in numbers]
        prefix = next((i for i, o in enumerate(expected) if o != Outcome.HIT), len(expected))
        ttl_s = None if ttl_ns is None else ttl_ns / SECOND_NS
        answer = person.client.lookup(spaces, numbers, ttl_s=ttl_s)
        self._settle()
        assert answer.outcomes.tolist() == expected
        assert answer.prefix_count == prefix
        assert (answer.lease is not None) == (ttl_ns is not None and prefix > 0)
        if answer.lease is None:
            return None
        return self._leased(person, spaces, numbers[:prefix], answer.lease, ttl_ns)

    def acquire(self, person: Person, salt: bytes, parts, numbers: list[int], *, ttl_ns=0):
        """Lease the committed prefix; return the lease's id or None."""
        if not self._hear(person):
            return None
        spaces = tuple(person.spaces[salt, each] for each in parts)
        expected = [self._lookup_outcome(person, spaces, number) for number in numbers]
        prefix = next((i for i, o in enumerate(expected) if o != Outcome.HIT), len(expected))
        answer = person.client.acquire(spaces, numbers, ttl_s=ttl_ns / SECOND_NS)
        self._settle()
        assert (answer is not None) == (prefix > 0)
        return answer and self._leased(person, spaces, numbers[:prefix], answer, ttl_ns)

    def release(self, person: Person, lease_ids: list[int]) -> None:
        """Release leases, live or ended, of this engine or another."""
        if not self._hear(person):
            return
        outcomes = person.client.release(*lease_ids)
        for lease_id, outcome in zip(lease_ids, outcomes, strict=True):
            holder = self.live.get(lease_id)
            if holder is not None and holder.engine == person.engine:
                assert outcome == Outcome.DONE
                self._end(lease_id, {Outcome.ALREADY_RELEASED}, None)
            else:
                assert outcome in self._past(person, lease_id)
        self._settle()

    def renew(self, person: Person, capability_ids: list[int], *, ttl_ns: int | None) -> None:
        """Renew capabilities, by a beat where `ttl_ns` is None."""
        if not self._hear(person):
            return
        known = {i: self.live.get(i) or self.ended[i][1] for i in capability_ids}
        leases = [i for i in capability_ids if not known[i].is_write]
        reservations = [i for i in capability_ids if known[i].is_write]
        if ttl_ns is None:
            answer = person.client.beat(leases=leases, reservations=reservations).renewal
        else:
            answer = person.client.renew(leases=leases, reservations=reservations, ttl_s=ttl_ns / SECOND_NS)
        found = [*answer.lease_outcomes.tolist(), *answer.reservation_outcomes.tolist()]
        deadline = self.world.now_ns + (ttl_ns or TTL_NS)
        for capability_id, outcome in zip([*leases, *reservations], found, strict=True):
            holder = self.live.get(capability_id)
            if holder is not None and holder.engine == person.engine:
                assert outcome == Outcome.DONE
                holder.deadline_ns = max(holder.deadline_ns, deadline)
            else:
                assert outcome in self._past(person, capability_id)
        self._settle()

    def acknowledge(self, person: Person, capability_ids: list[int]) -> None:
        """Say that a process touches revoked memory no more, and learn what else is revoked."""
        if not self._hear(person):
            return
        token = person.client.token
        answer = person.client.beat(acknowledged=capability_ids)
        for capability_id in capability_ids:
            if capability_id in self.waiting:
                self._let_go(capability_id, token)
        expected = sorted(i for i, (tokens, _) in self.waiting.items() if token in tokens)
        assert answer.revoked_ids.tolist() == expected
        self._settle()

    def purge(self, person: Person, salt: bytes) -> None:
        """Drop a namespace."""
        if not self._hear(person):
            return
        spaces = {space for (name, _), space in person.spaces.items() if name == salt}
        mine = self.visible[person.engine[0]]
        doomed = {where for where in mine if where[0] in spaces}
        count = person.client.purge(self.namespaces[person.engine[0], salt])
        assert count == len(doomed)
        self._settle(purged=spaces)
        assert not {where for where in mine if where[0] in spaces}

    def discard(self, person: Person, salt: bytes, parts, numbers: list[int]) -> None:
        """Find a prefix, and drop it as damaged; a second time it is somebody else's or nobody's."""
        if not self._hear(person):
            return
        spaces = tuple(person.spaces[salt, each] for each in parts)
        found = person.client.lookup(spaces, numbers, locate=True)
        if found.slots is None:
            self._settle()
            return
        assert person.client.discard(found.slots) == len(found.slots)
        self._settle(purged=frozenset(spaces))
        mine = self.visible[person.engine[0]]
        gone = {(space, number) for space in spaces for number in numbers[: found.prefix_count]}
        assert not gone & set(mine)
        assert person.client.discard(found.slots) == 0
        self._settle()

    # ---- transfers

    def begin(self, person: Person, capability_id: int, indexes: list[int]):
        """Begin a transfer over slots of a capability; return its id or None."""
        if not self._hear(person):
            return None
        holder = self.live.get(capability_id) or self.ended[capability_id][1]
        indexes = sorted({index % len(holder.places) for index in indexes})
        try:
            answer = person.client.begin(capability_id, indexes, is_write=holder.is_write)
        except KvError:
            assert capability_id not in self.live or holder.engine != person.engine
            return None
        finally:
            self._settle()
        assert capability_id in self.live
        assert holder.engine == person.engine
        places = [holder.places[index] for index in indexes]
        assert places_of(answer.slots) == places
        self.transfers[answer.transfer_id] = (capability_id, places, indexes, holder.is_write)
        return answer.transfer_id

    def end(self, transfer_id: int, *, has_arrived: bool) -> None:
        """End a transfer."""
        self._expire()
        capability_id, places, indexes, is_write = self.transfers.pop(transfer_id)
        sums = [1000 + index for index in indexes] if has_arrived and is_write else None
        try:
            self.world.end_transfer(transfer_id, sums)
        except KvError:
            assert capability_id not in self.live
        else:
            assert capability_id in self.live
            if sums is not None:
                self.live[capability_id].arrived.update(zip(indexes, sums, strict=True))
        self._free(places)
        self._settle()
