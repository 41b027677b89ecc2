"""The bounded log of a tenant, by itself and as the state writes it."""

import pytest

from kvservice.core.effects import NewsForTenant
from kvservice.core.errors import EventsLostError
from kvservice.core.history import KEYS_PER_EVENT, FactKind, History
from tests.core_world import World, keys

NAMESPACE = bytes(32)


def filled(count, *, limit_count):
    """Return a history to which `count` facts were told."""
    history = History(limit_count)
    for number in range(1, count + 1):
        history.append(FactKind.COMMITTED, namespace_id=NAMESPACE, space_id=number, keys=b"")
    return history


def test_sequence_numbers_start_at_one_and_have_no_gaps():
    """A follower that sees a gap knows that it lost something."""
    history = filled(3, limit_count=10)
    assert [fact.sequence for fact in history.after(0, limit_count=10)] == [1, 2, 3]
    assert history.last_sequence == 3
    assert History(10).last_sequence == 0


def test_a_follower_resumes_where_it_stopped():
    """The same resume point gives the same events, at most as many as asked for."""
    history = filled(5, limit_count=10)
    assert [fact.sequence for fact in history.after(2, limit_count=2)] == [3, 4]
    assert [fact.sequence for fact in history.after(2, limit_count=2)] == [3, 4]
    assert history.after(5, limit_count=2) == []


def test_what_is_no_longer_kept_is_lost_aloud():
    """The oldest events go first; a resume point before them is an error, never a silent gap."""
    history = filled(5, limit_count=3)
    assert [fact.sequence for fact in history.after(2, limit_count=10)] == [3, 4, 5]
    with pytest.raises(EventsLostError, match="events 2 to 2 are no longer kept"):
        history.after(1, limit_count=10)


def test_a_point_in_the_future_is_of_another_life():
    """A sequence that was never reached belongs to another daemon, whose events are lost."""
    with pytest.raises(EventsLostError, match="beyond the newest event 1"):
        filled(1, limit_count=3).after(2, limit_count=1)


def test_the_state_tells_commits_evictions_and_purges():
    """An index that follows the history knows which keys are visible, and is woken for it."""
    world = World(segments_count=1)
    client = world.attach()
    opened = client.open_answer()
    client.put(opened.space_ids, range(16))
    assert NewsForTenant("acme") in world.last_effects
    client.put(opened.space_ids, [16])
    client.purge(opened.namespace_id)
    assert NewsForTenant("acme") in world.last_effects
    facts = world.facts()
    kinds = [fact.kind for fact in facts]
    assert kinds == [
        FactKind.COMMITTED,
        FactKind.REMOVED,
        FactKind.COMMITTED,
        FactKind.REMOVED,
        FactKind.PURGED,
    ]
    assert facts[0].keys == keys(range(16))
    assert facts[1].keys == keys([15])
    assert len(facts[3].keys) == len(keys(range(16)))
    assert (facts[4].space_id, facts[4].keys) == (0, b"")
    assert {fact.namespace_id for fact in facts} == {opened.namespace_id}
    assert {fact.space_id for fact in facts[:4]} == set(opened.space_ids)


def test_a_tenant_sees_only_its_own_history():
    """Each tenant's numbers have no gaps, so another tenant's events are not in them."""
    world = World()
    for tenant in ("acme", "bolt"):
        client = world.attach(tenant)
        client.put(client.open(), [1])
    assert [fact.sequence for fact in world.facts("acme")] == [1]
    assert [fact.sequence for fact in world.facts("bolt")] == [1]


def test_an_aborted_reservation_leaves_no_trace():
    """What never was visible is no event."""
    world = World()
    client = world.attach()
    client.abort(client.reserve(client.open(), range(3)).reservation_id)
    assert world.facts() == []


def test_large_events_are_bounded_by_their_keys():
    """One event may carry thousands of keys, so the number of events alone is no bound on memory."""
    history = History(4)
    many = bytes(32 * KEYS_PER_EVENT * 3)
    for number in range(1, 4):
        history.append(FactKind.COMMITTED, namespace_id=NAMESPACE, space_id=number, keys=many)
    assert [fact.sequence for fact in history.after(2, limit_count=10)] == [3]
    with pytest.raises(EventsLostError):
        history.after(1, limit_count=10)
    huge = bytes(32 * KEYS_PER_EVENT * 100)
    history.append(FactKind.COMMITTED, namespace_id=NAMESPACE, space_id=4, keys=huge)
    assert [fact.sequence for fact in history.after(3, limit_count=10)] == [4]
