"""Writers that name their keys late, beside writers that name them at once."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvservice.core.errors import KvError
from kvservice.core.outcomes import ItemOutcome
from tests.core_world import World

KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)
AHEAD_LIMIT = 30
"""Slots that wait at once: with the keys they fit the arena, so that nothing is evicted."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS),
        st.tuples(st.just("ahead"), st.integers(1, 6)),
        st.tuples(st.just("name"), KEYS),
        st.tuples(st.just("abort"), st.just(None)),
        st.tuples(st.just("wait"), st.integers(0, 6)),
        st.tuples(st.just("leave"), st.just(None)),
    ),
    max_size=30,
)


@settings(max_examples=50)
@given(STEPS, st.booleans())
@example([("put", [0]), ("wait", 4), ("wait", 6)], False)
def test_the_first_commit_of_a_key_is_what_everybody_reads(steps, is_local):
    """Whatever the order: a key keeps the checksum of its first commit, and every slot is accounted for."""
    world = World()
    client = world.attach(is_local=is_local)
    spaces = client.open()
    stored, waiting, sums = {}, [], iter(range(1, 10_000))
    for verb, what in steps:
        try:
            if verb == "put":
                reservation = client.reserve(spaces, what)
                granted = [
                    k for k, o in zip(what, reservation.outcomes, strict=True) if o == ItemOutcome.GRANTED
                ]
                given_sums = [next(sums) for _ in granted]
                if granted:
                    client.commit(reservation, given_sums)
                stored.update(zip(granted, given_sums, strict=True))
            elif verb == "ahead" and sum(count for _, count in waiting) < AHEAD_LIMIT:
                waiting.append((client.reserve_unnamed(spaces, what), what))
            elif verb == "name" and waiting:
                reservation, count = waiting.pop(0)
                named = what[:count]
                given_sums = [next(sums) for _ in named]
                outcomes = client.commit_named(reservation, named, given_sums).outcomes
                for key, checksum, outcome in zip(named, given_sums, outcomes, strict=True):
                    assert (outcome == ItemOutcome.DONE) == (key not in stored)
                    stored.setdefault(key, checksum)
            elif verb == "abort" and waiting:
                client.abort(waiting.pop(0)[0].reservation_id)
            elif verb == "wait":
                world.advance(what)
            elif verb == "leave":
                client.leave()
                client, waiting = world.attach(is_local=is_local), []
                spaces = client.open()
        except KvError:
            # A reservation expired, or the session of a client of another host was silent for too long.
            if client.token not in world.books.sessions:
                client, waiting = world.attach(is_local=is_local), []
                spaces = client.open()
    if client.token not in world.books.sessions:
        # Silent for too long in its last steps.
        client = world.attach(is_local=is_local)
        spaces = client.open()
    for key, checksum in stored.items():
        lease = client.acquire(spaces, [key])
        assert lease is not None
        assert lease.slots.checksums.tolist() == [checksum]
