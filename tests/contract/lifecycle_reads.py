"""The part of the lifecycle contract about reading: lookup, acquire, renew, release."""

from __future__ import annotations

import google_crc32c
import pytest

from kvservice.ports.methods import Method
from tests.contract.lifecycle_contract import (
    ALREADY_ABORTED,
    ALREADY_COMMITTED,
    ALREADY_EXPIRED,
    ALREADY_RELEASED,
    BATCH_SIZE,
    BLOCK_BYTES,
    DONE,
    HIT,
    INVALID_FIELD,
    LIMIT_REACHED,
    MAX_BATCH_KEYS,
    MISS,
    PENDING,
    SLOTS_COUNT,
    SPACE_NOT_OPEN,
    TTL_S,
    UNKNOWN,
    check_refused,
)
from tests.contract.lifecycle_edges import Engine, Unpacked, key, keys

OTHER_CHECKSUM = 0x0DDBA11
"""A CRC32C that the bytes in these tests do not have."""


class ReadContract:
    """Lookup, acquire, renew, release."""

    def test_lookup_answers_each_key_and_the_prefix(self, peer):
        """The prefix is contiguous: a hole ends it, whatever comes behind."""
        engine = Engine(peer)
        engine.open()
        engine.put([1, 2, 4])
        engine.reserve([3])
        answer = engine.lookup([1, 2, 3, 4, 5])
        assert list(answer.outcomes) == [HIT, HIT, PENDING, HIT, MISS]
        assert answer.prefix_count == 2
        assert not answer.HasField("lease")

    def test_lookup_can_lease_the_prefix_in_the_same_call(self, peer):
        """A lookup without a lease is a race; with one it is not."""
        engine = Engine(peer)
        engine.open()
        engine.put([1, 2, 4])
        answer = engine.lookup([1, 2, 3, 4], acquire=True, lease_ttl={"seconds": 5})
        assert answer.lease.keys_count == answer.prefix_count == 2
        slots = Unpacked.of(answer.lease.slots)
        assert len(slots.places) == len(slots.checksums) == 2
        assert answer.lease.remaining.seconds == 5
        assert not engine.lookup([9, 1], acquire=True).HasField("lease")
        assert engine.release(answer.lease.lease_id) == [DONE]

    @pytest.mark.parametrize("method", [Method.LOOKUP, Method.ACQUIRE])
    @pytest.mark.parametrize(
        ("fields", "kind", "says"),
        [
            ({"keys": b"k" * 33}, INVALID_FIELD, "keys has 33 bytes"),
            ({"keys": b""}, BATCH_SIZE, "keys has 0 items"),
            ({"keys": keys(range(MAX_BATCH_KEYS + 1))}, BATCH_SIZE, "split the batch"),
            ({"space_ids": []}, INVALID_FIELD, "space_ids has 0"),
            ({"space_ids": [4711]}, SPACE_NOT_OPEN, "OpenNamespace"),
        ],
    )
    def test_a_bad_read_is_refused(self, peer, method, fields, kind, says):
        """Field, value and way out are named, and no lease is left behind."""
        engine = Engine(peer)
        engine.open()
        check_refused(
            kind, peer.call, method, says=says, **({"space_ids": engine.spaces, "keys": key(1)} | fields)
        )
        assert peer.call(Method.LIST_TIERS).owners[0].leases_count == 0

    def test_a_lease_asks_for_a_positive_life(self, peer):
        """A life of nothing is a mistake, not the default."""
        engine = Engine(peer)
        engine.open()
        engine.put([1])
        check_refused(INVALID_FIELD, engine.acquire, [1], ttl={"seconds": 0}, says="ttl is 0")
        check_refused(
            INVALID_FIELD, engine.lookup, [1], acquire=True, lease_ttl={"seconds": -5}, says="lease_ttl"
        )
        check_refused(INVALID_FIELD, engine.renew, ttl={"nanos": -1}, says="ttl is -1")

    def test_acquire_leases_the_prefix_or_nothing(self, peer):
        """A miss is no failure: there is just no lease. Each success is another lease."""
        engine = Engine(peer)
        engine.open()
        engine.put([1, 2])
        first, second = engine.acquire([1, 2, 3]).lease, engine.acquire([1]).lease
        assert (first.keys_count, second.keys_count) == (2, 1)
        assert first.lease_id != second.lease_id
        assert not engine.acquire([3, 1]).HasField("lease")
        assert peer.call(Method.LIST_TIERS).owners[0].leases_count == 2

    def test_leases_of_a_session_are_bounded(self, make_house, connect):
        """The refusal counts what is held; a plain lookup still answers."""
        engine = Engine(connect(make_house(KVSERVICE_LIMITS__MAX_LEASES_PER_SESSION="1")))
        engine.open()
        engine.put([1])
        lease = engine.acquire([1]).lease
        check_refused(LIMIT_REACHED, engine.acquire, [1], says="holds 1 leases")
        check_refused(LIMIT_REACHED, engine.lookup, [1], acquire=True)
        assert engine.outcomes([1]) == [HIT]
        engine.release(lease.lease_id)
        assert engine.acquire([1]).HasField("lease")

    def test_a_leased_block_is_not_evicted(self, peer):
        """What somebody reads stays; the others go, oldest first, in a batch that needs their room."""
        engine = Engine(peer)
        engine.open()
        engine.put(range(SLOTS_COUNT))
        engine.acquire([0])
        engine.put(range(1000, 1000 + SLOTS_COUNT - 1))
        assert engine.outcomes([0, 1, 2]) == [HIT, MISS, MISS]
        assert engine.tier().evicted_count == SLOTS_COUNT - 1

    def test_a_damaged_block_is_dropped_when_it_is_verified(self, peer):
        """Sound ones and those without a checksum stay; the key of a dropped one can be written again."""
        engine = Engine(peer)
        engine.open()
        engine.put([1])
        engine.commit(engine.reserve([2]), [OTHER_CHECKSUM])
        assert engine.outcomes([1, 2]) == [HIT, HIT]
        assert engine.verify([1, 2, 3]) == [HIT, MISS, MISS]
        assert engine.outcomes([1, 2]) == [HIT, MISS]
        assert engine.tier().evicted_count == 1
        engine.put([2])
        assert engine.verify([1, 2]) == [HIT, HIT]

    def test_a_damaged_block_is_dropped_in_all_its_parts(self, peer):
        """A block of which one part is wrong is no block."""
        engine = Engine(peer)
        engine.open(BLOCK_BYTES, BLOCK_BYTES)
        sound = google_crc32c.value(bytes(BLOCK_BYTES))
        engine.commit(engine.reserve([1, 2]), [sound, OTHER_CHECKSUM, sound, sound])
        assert engine.verify([1, 2]) == [MISS, HIT]
        assert engine.outcomes([1, 2]) == [MISS, HIT]
        assert engine.tier().evicted_count == 2

    def test_a_damaged_block_under_a_lease_is_dropped_for_others_only(self, peer):
        """The lease keeps its slots until its end; nobody gets a new one."""
        engine = Engine(peer)
        engine.open()
        engine.commit(engine.reserve([1]), [OTHER_CHECKSUM])
        lease = engine.acquire([1]).lease
        assert engine.verify([1]) == [MISS]
        assert not engine.acquire([1]).HasField("lease")
        assert engine.release(lease.lease_id) == [DONE]

    def test_few_keys_are_verified_in_one_call(self, peer):
        """The bytes are looked at while all others wait."""
        engine = Engine(peer)
        engine.open()
        check_refused(BATCH_SIZE, engine.verify, range(17), says="at most 16")
        check_refused(BATCH_SIZE, engine.verify, [])
        fields = {"space_ids": engine.spaces, "keys": key(1) + b"more"}
        check_refused(INVALID_FIELD, engine.peer.call, Method.VERIFY, says="keys has 36 bytes", **fields)

    def test_large_blocks_are_verified_one_by_one(self, peer, monkeypatch):
        """Where all of them are more bytes than others can be made to wait for."""
        engine = Engine(peer)
        engine.open()
        engine.put([1, 2])
        monkeypatch.setattr("kvservice.engine.verification.VERIFIED_BYTES_LIMIT", BLOCK_BYTES)
        check_refused(BATCH_SIZE, engine.verify, [1, 2], says=f"of {BLOCK_BYTES} bytes each")
        assert engine.verify([1]) == [HIT]

    def test_release_is_idempotent(self, house, peer):
        """Late, second and foreign releases are answered as data and change nothing."""
        engine = Engine(peer)
        engine.open()
        engine.put([1])
        lease, expiring = engine.acquire([1]).lease, engine.acquire([1], ttl={"seconds": 1}).lease
        house.time.advance(1)
        assert engine.release(lease.lease_id, expiring.lease_id, 12345) == [DONE, ALREADY_EXPIRED, UNKNOWN]
        assert engine.release(lease.lease_id) == [ALREADY_RELEASED]
        assert engine.release() == []

    def test_a_stranger_cannot_end_or_renew_a_lease(self, house, connect):
        """To another engine a lease does not exist."""
        owner, stranger = Engine(connect(house)), Engine(connect(house))
        owner.open()
        owner.put([1])
        lease = owner.acquire([1]).lease.lease_id
        assert stranger.release(lease) == [UNKNOWN]
        assert list(stranger.renew(lease_ids=[lease]).lease_outcomes) == [UNKNOWN]
        assert owner.release(lease) == [DONE]

    def test_renewing_prolongs_and_never_shortens(self, house, peer):
        """The end of a lease or reservation moves only away."""
        engine = Engine(peer)
        engine.open()
        engine.put([1])
        lease, reservation = engine.acquire([1]).lease.lease_id, engine.reserve([2]).reservation_id
        fields = {"lease_ids": [lease], "reservation_ids": [reservation]}
        answer = engine.renew(ttl={"seconds": 1}, **fields)
        assert [*answer.lease_outcomes, *answer.reservation_outcomes] == [DONE, DONE]
        house.time.advance(TTL_S - 1)
        assert list(engine.renew(ttl={"seconds": 30}, **fields).lease_outcomes) == [DONE]
        house.time.advance(29)
        assert engine.outcomes([1, 2]) == [HIT, PENDING]
        assert engine.release(lease) == [DONE]
        house.time.advance(2)
        answer = engine.renew(**fields)
        assert [*answer.lease_outcomes, *answer.reservation_outcomes] == [ALREADY_RELEASED, ALREADY_EXPIRED]

    def test_what_has_ended_is_an_outcome_of_a_renewal(self, peer):
        """Each end has its own word: committed, aborted, unknown."""
        engine = Engine(peer)
        engine.open()
        done, given_up = engine.put([1]), engine.reserve([2])
        engine.abort(given_up.reservation_id)
        ids = [done.reservation_id, given_up.reservation_id, 77]
        assert list(engine.renew(reservation_ids=ids).reservation_outcomes) == [
            ALREADY_COMMITTED,
            ALREADY_ABORTED,
            UNKNOWN,
        ]

    def test_renewals_and_releases_are_bounded(self, peer):
        """A batch of more than the limit is refused whole."""
        engine = Engine(peer)
        many = list(range(MAX_BATCH_KEYS + 1))
        check_refused(BATCH_SIZE, engine.renew, lease_ids=many, says="lease_ids")
        check_refused(BATCH_SIZE, engine.renew, reservation_ids=many, says="reservation_ids")
        check_refused(BATCH_SIZE, engine.release, *many, says="lease_ids")
