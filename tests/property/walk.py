"""One random step of a Twin, drawn from a seeded generator."""

from __future__ import annotations

import random

from tests.core_world import SECOND_NS
from tests.property.model import ENGINES, SALTS, SETS, TENANTS, Person
from tests.property.twin import Twin

PEOPLE_LIMIT = 8
REMEMBERED = 40
"""Capabilities of the past that steps name again."""
KEYS = 24

VERBS = {
    "reserve": 22,
    "commit": 14,
    "abort": 2,
    "lookup": 6,
    "lease": 12,
    "acquire": 6,
    "release": 8,
    "renew": 5,
    "acknowledge": 5,
    "purge": 1,
    "begin": 8,
    "end": 6,
    "advance": 5,
    "attach": 3,
    "resume": 1,
    "leave": 1,
}


class Walk:
    """Steps at random, most of them sensible, some not."""

    def __init__(self, twin: Twin, rng: random.Random) -> None:
        self.twin = twin
        self._rng = rng
        self._people: list[Person] = []
        self._capabilities: list[int] = []
        self._requests: list[tuple] = []

    def step(self) -> None:
        """Do one thing."""
        verb = self._rng.choices(list(VERBS), weights=list(VERBS.values()))[0]
        if len(self.twin.people) < 2:
            verb = "attach"
        getattr(self, f"_{verb}")()

    def _person(self) -> Person:
        if self._rng.random() < 0.97:
            return self._rng.choice(list(self.twin.people.values()))
        return self._rng.choice(self._people[-PEOPLE_LIMIT * 2 :])

    def _batch(self) -> tuple[bytes, tuple[int, ...], list[int]]:
        first = self._rng.choice((0, 0, self._rng.randrange(KEYS)))
        count = self._rng.randint(1, 8)
        return self._rng.choice(SALTS), self._rng.choice(SETS), list(range(first, first + count))

    def _capability(self, *, is_write: bool | None = None) -> tuple[Person, int] | None:
        """Return somebody (its owner's engine, mostly) and a capability, live mostly."""
        twin = self.twin
        live = [i for i, h in twin.live.items() if is_write in {None, h.is_write}]
        past = [
            i
            for i in self._capabilities[-REMEMBERED:]
            if i not in twin.live and is_write in {None, twin.ended[i][1].is_write}
        ]
        pick = live if live and self._rng.random() < 0.85 else past
        if not pick:
            return None
        capability_id = self._rng.choice(pick)
        holder = twin.live.get(capability_id) or twin.ended[capability_id][1]
        peers = [p for p in twin.people.values() if p.engine == holder.engine]
        person = self._rng.choice(peers) if peers and self._rng.random() < 0.9 else self._person()
        return person, capability_id

    def _remember(self, capability_id: int | None) -> None:
        if capability_id:
            self._capabilities.append(capability_id)

    def _ttl_ns(self) -> int:
        return self._rng.choice((0, 0, SECOND_NS, 5 * SECOND_NS, 30 * SECOND_NS))

    def _attach(self) -> None:
        if len(self.twin.people) < PEOPLE_LIMIT:
            tenant, engine = self._rng.choice(TENANTS), self._rng.choice(ENGINES)
            self._people.append(self.twin.attach(tenant, engine, is_local=self._rng.random() < 0.6))

    def _resume(self) -> None:
        self.twin.resume(self._person())

    def _leave(self) -> None:
        self.twin.leave(self._person())

    def _advance(self) -> None:
        self.twin.advance(self._rng.choice((1, SECOND_NS // 3, SECOND_NS, 3 * SECOND_NS)))

    def _reserve(self) -> None:
        if self._requests and self._rng.random() < 0.1:
            person, batch, request = self._rng.choice(self._requests[-5:])
            if self._rng.random() < 0.2:
                batch = (batch[0], batch[1], [*batch[2], KEYS + 9])
            capability_id = self.twin.reserve(person, *batch, request=request)
        else:
            person, batch, request = self._person(), self._batch(), self.twin.world.fresh()
            self._requests.append((person, batch, request))
            ttl_ns = self._ttl_ns()
            capability_id = self.twin.reserve(person, *batch, ttl_ns=ttl_ns, request=request)
        if capability_id not in self._capabilities:
            self._remember(capability_id)

    def _commit(self) -> None:
        if found := self._capability(is_write=True):
            self.twin.commit(*found, is_honest=self._rng.random() < 0.9)

    def _abort(self) -> None:
        if found := self._capability(is_write=True):
            self.twin.abort(*found)

    def _lookup(self) -> None:
        self.twin.lookup(self._person(), *self._batch())

    def _lease(self) -> None:
        self._remember(self.twin.lookup(self._person(), *self._batch(), ttl_ns=self._ttl_ns()))

    def _acquire(self) -> None:
        self._remember(self.twin.acquire(self._person(), *self._batch(), ttl_ns=self._ttl_ns()))

    def _release(self) -> None:
        found = [self._capability(is_write=False) for _ in range(self._rng.randint(1, 3))]
        known = [each for each in found if each]
        if known:
            self.twin.release(known[0][0], [capability_id for _, capability_id in known])

    def _renew(self) -> None:
        if found := self._capability():
            self.twin.renew(found[0], [found[1]], ttl_ns=self._rng.choice((None, 0, SECOND_NS)))

    def _acknowledge(self) -> None:
        waiting = sorted(self.twin.waiting)
        owed = self._rng.sample(waiting, min(len(waiting), 2))
        self.twin.acknowledge(self._person(), [*owed, *self._capabilities[-1:]])

    def _purge(self) -> None:
        self.twin.purge(self._person(), self._rng.choice(SALTS))

    def _begin(self) -> None:
        if len(self.twin.transfers) < 6 and (found := self._capability()):
            self.twin.begin(*found, [self._rng.randrange(24) for _ in range(3)])

    def _end(self) -> None:
        if self.twin.transfers:
            transfer_id = self._rng.choice(sorted(self.twin.transfers))
            self.twin.end(transfer_id, has_arrived=self._rng.random() < 0.7)
