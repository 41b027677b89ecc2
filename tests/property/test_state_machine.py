"""The state beside its model, driven by Hypothesis, which shrinks what it finds."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tests.core_world import OPERATIONS, SECOND_NS
from tests.property.model import ENGINES, SALTS, SETS, TENANTS
from tests.property.twin import Twin

EXAMPLES = {"native": 80, "numpy": 30}
STEPS = 40

TTLS_NS = st.sampled_from((0, SECOND_NS, 30 * SECOND_NS))
SETS_OF_PARTS = st.sampled_from(SETS)
SALT = st.sampled_from(SALTS)
NUMBERS = st.builds(
    lambda first, count: list(range(first, first + count)),
    st.sampled_from((0, 0, 0, 4, 8)),
    st.integers(1, 12),
)


class KvMachine(RuleBasedStateMachine):
    """Each rule is a verb of the twin, which compares the answer; each step is followed by every check."""

    operations = None

    people = Bundle("people")
    reservations = Bundle("reservations")
    leases = Bundle("leases")
    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.twin = Twin(self.operations)

    @initialize(target=people)
    def two_processes_of_an_engine(self):
        return multiple(*(self.twin.attach(TENANTS[0], ENGINES[0], is_local=True) for _ in range(2)))

    @rule(
        target=people,
        tenant=st.sampled_from(TENANTS),
        engine=st.sampled_from(ENGINES),
        is_local=st.booleans(),
    )
    def attach(self, tenant, engine, is_local):
        return self.twin.attach(tenant, engine, is_local=is_local)

    @rule(person=people)
    def resume(self, person):
        self.twin.resume(person)

    @rule(person=people)
    def leave(self, person):
        self.twin.leave(person)

    @rule(seconds=st.sampled_from((0.5, 1, 3, 11)))
    def advance(self, seconds):
        self.twin.advance(round(seconds * SECOND_NS))

    @rule(target=reservations, person=people, salt=SALT, parts=SETS_OF_PARTS, numbers=NUMBERS, ttl_ns=TTLS_NS)
    def reserve(self, person, salt, parts, numbers, ttl_ns):
        found = self.twin.reserve(person, salt, parts, numbers, ttl_ns=ttl_ns)
        return multiple(*([found] if found else []))

    @rule(person=people, salt=SALT, parts=SETS_OF_PARTS, numbers=NUMBERS)
    def put(self, person, salt, parts, numbers):
        found = self.twin.reserve(person, salt, parts, numbers)
        if found:
            self.twin.commit(person, found)

    @rule(person=people, reservation=reservations, is_honest=st.booleans())
    def commit(self, person, reservation, is_honest):
        self.twin.commit(person, reservation, is_honest=is_honest)

    @rule(person=people, reservation=reservations)
    def abort(self, person, reservation):
        self.twin.abort(person, reservation)

    @rule(
        target=leases,
        person=people,
        salt=SALT,
        parts=SETS_OF_PARTS,
        numbers=NUMBERS,
        ttl_ns=st.none() | TTLS_NS,
    )
    def lookup(self, person, salt, parts, numbers, ttl_ns):
        found = self.twin.lookup(person, salt, parts, numbers, ttl_ns=ttl_ns)
        return multiple(*([found] if found else []))

    @rule(target=leases, person=people, salt=SALT, parts=SETS_OF_PARTS, numbers=NUMBERS, ttl_ns=TTLS_NS)
    def acquire(self, person, salt, parts, numbers, ttl_ns):
        found = self.twin.acquire(person, salt, parts, numbers, ttl_ns=ttl_ns)
        return multiple(*([found] if found else []))

    @rule(person=people, some=st.lists(leases, max_size=3))
    def release(self, person, some):
        self.twin.release(person, some)

    @rule(person=people, some=st.lists(leases | reservations, max_size=3), ttl_ns=st.none() | TTLS_NS)
    def renew(self, person, some, ttl_ns):
        self.twin.renew(person, some, ttl_ns=ttl_ns)

    @rule(person=people, some=st.lists(leases | reservations, max_size=3))
    def acknowledge(self, person, some):
        self.twin.acknowledge(person, some)

    @rule(person=people, salt=SALT)
    def purge(self, person, salt):
        self.twin.purge(person, salt)

    @rule(person=people, salt=SALT, parts=SETS_OF_PARTS, numbers=NUMBERS)
    def discard(self, person, salt, parts, numbers):
        self.twin.discard(person, salt, parts, numbers)

    @rule(
        target=transfers,
        person=people,
        capability=leases | reservations,
        indexes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    )
    def begin_transfer(self, person, capability, indexes):
        found = self.twin.begin(person, capability, indexes)
        return multiple(*([found] if found else []))

    @rule(transfer=transfers, has_arrived=st.booleans())
    def end_transfer(self, transfer, has_arrived):
        if transfer in self.twin.transfers:
            self.twin.end(transfer, has_arrived=has_arrived)

    @invariant()
    def blocks_are_the_models(self):
        self.twin.check_blocks()


@pytest.mark.parametrize("operations", OPERATIONS)
def test_the_state_is_its_model(operations):
    """After any steps every answer is the model's, and every invariant holds after each of them."""

    class Machine(KvMachine):
        pass

    Machine.operations = OPERATIONS[operations]
    limits = settings(
        max_examples=EXAMPLES[operations],
        stateful_step_count=STEPS,
        # A rule about a lease needs a lease: early steps find none and are passed over.
        suppress_health_check=[HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Machine, settings=limits)
