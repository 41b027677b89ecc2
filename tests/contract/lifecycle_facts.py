"""The rest of the lifecycle contract: tiers, purge, capabilities, events, draining, revocations."""

from __future__ import annotations

from kvproto.kv.v1 import capabilities_service_pb2
from kvservice.ports.methods import Method
from tests.contract.lifecycle_contract import (
    COMMITTED,
    DONE,
    EVENTS_LOST,
    HIT,
    INVALID_FIELD,
    MISS,
    PURGED,
    REMOVED,
    SLOTS_COUNT,
    SLOTS_PER_SEGMENT,
    STALE_INCARNATION,
    TTL_S,
    check_refused,
)
from tests.contract.lifecycle_edges import BLOCK_BYTES, CAPACITY_BYTES, SEGMENT_BYTES, Engine, keys


class FactsContract:
    """What operators and routers ask."""

    def test_the_slots_of_a_tier_add_up(self, peer):
        """Free + reserved + committed + evicting + quarantined = total, and bytes follow."""
        engine = Engine(peer, name="the name")
        engine.open()
        engine.put([1, 2, 3])
        engine.acquire([1])
        engine.reserve([4, 5])
        engine.peer.call(Method.PURGE_NAMESPACE, namespace_id=engine.namespace_id)
        answer = peer.call(Method.LIST_TIERS)
        (tier,), (owner,) = answer.tiers, answer.owners
        assert (tier.name, tier.capacity_bytes) == ("dram", CAPACITY_BYTES)
        assert 1 <= tier.segments_lent_count <= tier.segments_total_count == CAPACITY_BYTES // SEGMENT_BYTES
        assert tier.slots_total_count == tier.segments_lent_count * SLOTS_PER_SEGMENT
        assert (tier.slots_reserved_count, tier.slots_committed_count) == (2, 0)
        assert (tier.slots_evicting_count, tier.slots_quarantined_count) == (1, 0)
        assert tier.slots_free_count == tier.slots_total_count - 3
        assert tier.used_bytes == 3 * BLOCK_BYTES
        assert (owner.client_name, owner.tenant, owner.is_local) == ("the name", "default", peer.is_local)
        assert (owner.reservations_count, owner.slots_reserved_count, owner.leases_count) == (1, 2, 1)
        assert owner.session_id == engine.attached.session_id

    def test_tiers_and_capabilities_need_no_session(self, house, peer):
        """A probe can look without becoming somebody."""
        answer = peer.call(Method.LIST_TIERS)
        assert not answer.owners
        facts = peer.call(Method.GET_CAPABILITIES)
        assert facts.version
        assert len(facts.daemon_incarnation) == 16
        assert list(facts.tiers) == ["dram"]
        assert list(facts.representation_versions) == [1]
        places = {transport.name: transport.address for transport in facts.transports}
        assert places == {"shm": house.endpoints.socket_path, "tcp": house.endpoints.tcp_address}
        limits = capabilities_service_pb2.Limits(
            max_batch_keys=16_384,
            max_block_bytes=SEGMENT_BYTES,
            max_message_bytes=16 << 20,
            max_ttl_ms=60_000,
            max_reservations=4096,
            max_leases=16_384,
            arena_bytes=CAPACITY_BYTES,
            segment_bytes=SEGMENT_BYTES,
        )
        assert facts.limits == limits
        assert Engine(peer).attached.limits == limits

    def test_purge_makes_blocks_invisible_and_frees_them_when_nobody_reads(self, peer):
        """A leased block goes from sight at once and from memory with its last lease."""
        engine = Engine(peer)
        engine.open(salt=b"kept")
        engine.put([1])
        kept = engine.spaces
        engine.open(salt=b"purged")
        engine.put([1, 2, 3])
        lease = engine.acquire([1]).lease
        purge = {"namespace_id": engine.namespace_id}
        assert peer.call(Method.PURGE_NAMESPACE, **purge).blocks_count == 3
        assert peer.call(Method.PURGE_NAMESPACE, **purge).blocks_count == 0
        assert engine.outcomes([1, 2, 3]) == [MISS, MISS, MISS]
        assert engine.tier().slots_evicting_count == 1
        assert engine.release(lease.lease_id) == [DONE]
        assert engine.tier().slots_evicting_count == 0
        engine.spaces = kept
        assert engine.outcomes([1]) == [HIT]

    def test_purge_of_what_is_not_there_purges_nothing(self, peer):
        """An unknown namespace is no failure; a malformed id is."""
        engine = Engine(peer)
        assert peer.call(Method.PURGE_NAMESPACE, namespace_id=bytes(32)).blocks_count == 0
        check_refused(
            INVALID_FIELD,
            engine.peer.call,
            Method.PURGE_NAMESPACE,
            namespace_id=b"n" * 31,
            says="namespace_id has 31",
        )

    def test_a_draining_daemon_takes_no_new_work_and_lets_open_work_end(self, make_house, connect):
        """Draining refuses Attach and Reserve with a hint; commits, reads and releases go on."""
        house = make_house(KVSERVICE_SERVER__DRAIN_TIMEOUT_MS="9000")
        engine = Engine(connect(house))
        engine.open()
        engine.put([1])
        reservation = engine.reserve([2])
        lease = engine.acquire([1]).lease.lease_id
        engine.peer.listen()
        house.begin_stop()
        assert engine.peer.notice().draining
        kind = ("UNAVAILABLE", "DRAINING")
        check_refused(kind, engine.reserve, [3])
        if engine.peer.is_local:
            check_refused(kind, Engine, connect(house))
        assert engine.commit(reservation).outcome == DONE
        assert engine.outcomes([1, 2, 3]) == [HIT, HIT, MISS]
        assert engine.release(lease) == [DONE]
        house.close()
        assert not house.is_running


class EventContract:
    """The history of blocks, as a stream."""

    def test_events_come_in_order_and_as_they_happen(self, peer):
        """Commit, eviction and purge are told with their keys, numbered without gaps."""
        engine = Engine(peer)
        engine.open()
        watch = peer.watch(after_sequence=0)
        engine.put([1, 2])
        first = watch.next()
        assert first.daemon_incarnation == engine.attached.daemon_incarnation
        (event,) = first.events
        assert (event.sequence, event.kind, event.keys) == (1, COMMITTED, keys([1, 2]))
        assert (event.namespace_id, event.space_id) == (engine.namespace_id, engine.spaces[0])
        peer.call(Method.PURGE_NAMESPACE, namespace_id=engine.namespace_id)
        events = list(watch.next().events)
        while events[-1].kind != PURGED:
            events += watch.next().events
        assert [event.sequence for event in events] == list(range(2, 2 + len(events)))
        assert {event.kind for event in events[:-1]} == {REMOVED}
        assert sorted(b"".join(event.keys for event in events)) == sorted(keys([1, 2]))
        assert (events[-1].namespace_id, events[-1].keys) == (engine.namespace_id, b"")

    def test_evictions_are_told(self, peer):
        """A router learns what is no longer here."""
        engine = Engine(peer)
        engine.open()
        engine.put(range(SLOTS_COUNT))
        watch = peer.watch(after_sequence=1)
        engine.put([1000, 1001])
        event = watch.next().events[0]
        assert event.kind == REMOVED
        gone = [event.keys[start : start + 32] for start in range(0, len(event.keys), 32)]
        assert [engine.outcomes(one) for one in gone] == [[MISS]] * len(gone)

    def test_a_watcher_resumes_where_it_was(self, house, connect):
        """The same point gives the same events; without a point only what is to come."""
        engine = Engine(connect(house))
        engine.open()
        for number in range(5):
            engine.put([number])
        incarnation = engine.attached.daemon_incarnation
        for after in (0, 3):
            peer = connect(house)
            Engine(peer)
            watch = peer.watch(after_sequence=after, daemon_incarnation=incarnation)
            sequences: list[int] = []
            while not sequences or sequences[-1] < 5:
                sequences += [event.sequence for event in watch.next().events]
            assert sequences == list(range(after + 1, 6))

    def test_a_point_that_is_no_longer_kept_is_lost(self, make_house, connect):
        """History is bounded; what was dropped is a failure, never a silent gap."""
        engine = Engine(connect(make_house(KVSERVICE_LIMITS__EVENT_HISTORY="2")))
        engine.open()
        for number in range(5):
            engine.put([number])
        check_refused(EVENTS_LOST, engine.peer.watch(after_sequence=2).next, says="events 3 to 3")
        assert [event.sequence for event in engine.peer.watch(after_sequence=3).next().events] == [4, 5]
        check_refused(EVENTS_LOST, engine.peer.watch(after_sequence=99).next, says="99")

    def test_a_point_of_another_life_is_stale(self, peer):
        """A sequence number means nothing in another life of the daemon."""
        Engine(peer)
        watch = peer.watch(after_sequence=0, daemon_incarnation=b"i" * 16)
        check_refused(STALE_INCARNATION, watch.next, says=(b"i" * 16).hex())


class ExpiryContract:
    """What ends without its holder's word."""

    def test_what_expires_frees_its_slots_once_nobody_touches_them(self, house, peer):
        """A local process is asked before its memory is reused; for a remote one the wire is the gate."""
        engine = Engine(peer)
        engine.open()
        engine.peer.listen()
        reservation = engine.reserve([1, 2])
        house.time.advance(TTL_S)
        engine.beat()
        tier = engine.tier()
        if not peer.is_local:
            assert (tier.slots_quarantined_count, tier.used_bytes) == (0, 0)
            return
        assert tier.slots_quarantined_count == 2
        assert list(peer.notice().revoked_ids) == [reservation.reservation_id]
        assert list(engine.beat().revoked_ids) == [reservation.reservation_id]
        assert not engine.beat(acknowledged_ids=[reservation.reservation_id]).revoked_ids
        assert engine.tier().slots_quarantined_count == 0

    def test_an_expired_lease_lets_its_blocks_be_evicted(self, house, peer):
        """A reader that forgot to release holds nothing for ever."""
        engine = Engine(peer)
        engine.open()
        engine.put(range(SLOTS_COUNT))
        lease = engine.acquire(range(SLOTS_COUNT)).lease
        check_refused(("RESOURCE_EXHAUSTED", "ARENA_FULL"), engine.reserve, [9001])
        house.time.advance(TTL_S)
        engine.beat(acknowledged_ids=[lease.lease_id])
        engine.put([9001])
        assert engine.outcomes([9001]) == [HIT]


__all__ = ["EventContract", "ExpiryContract", "FactsContract"]
