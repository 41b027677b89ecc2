"""What a caller gets wrong is a typed error that names field, value and way out, and loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvclient import (
    BatchSizeError,
    BlockBuffers,
    BlockSizeError,
    ChecksumMismatchError,
    ClientSettings,
    DuplicateKeyError,
    InvalidFieldError,
    ItemOutcome,
    NotOwnerError,
    PeerUnavailableError,
    RequestIdReusedError,
    ReservationExpiredError,
)
from kvclient.sync import KvClient
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    check_stored,
    content,
    identity,
    key,
    keys,
    opened,
    parts,
    settings_of,
    tier,
    until,
    until_passed,
)


@pytest.fixture(params=["lane", "grpc"])
def endpoint(request, shared_daemon):
    """The daemon's address over one of the two ways."""
    return getattr(shared_daemon, request.param)


@pytest.fixture
def client_and_namespace(endpoint, salt):
    """A client, and a namespace with the blocks 0 to 3; they are still there after the test."""
    with opened(endpoint, salt=salt) as (client, namespace):
        namespace.put(keys(range(4)), content(range(4)))
        yield client, namespace
        check_stored(namespace, range(4))
        owner = next(
            one for one in client.list_tiers().owners if one.session_id == client.attachment.session_id
        )
        assert (owner.reservations_count, owner.slots_reserved_count) == (0, 0)


@pytest.fixture
def namespace(client_and_namespace):
    """The namespace alone."""
    return client_and_namespace[1]


def read_only(array: np.ndarray) -> np.ndarray:
    """Return an array that refuses writes."""
    array.flags.writeable = False
    return array


BAD_MEMORY = {
    "too small": (lambda: bytearray(BLOCK_BYTES - 1), BlockSizeError, [str(BLOCK_BYTES - 1)]),
    "too large": (lambda: [bytearray(BLOCK_BYTES + 1)], BlockSizeError, ["blocks[0]", str(BLOCK_BYTES + 1)]),
    "pieces too short": (
        lambda: [[bytearray(10), bytearray(10)]],
        BlockSizeError,
        ["blocks[0] has 20 bytes"],
    ),
    "too few blocks": (list, BatchSizeError, ["blocks is empty"]),
    "too many blocks": (lambda: [bytearray(BLOCK_BYTES)] * 2, InvalidFieldError, ["2 blocks for 1 keys"]),
    "not contiguous": (lambda: np.zeros((BLOCK_BYTES, 2), np.uint8)[:, 0], InvalidFieldError, ["contiguous"]),
    "not contiguous in a list": (
        lambda: [np.zeros((BLOCK_BYTES, 2), np.uint8)[:, 0]],
        InvalidFieldError,
        ["blocks[0]", "contiguous", "strided"],
    ),
    "empty": (lambda: [b""], InvalidFieldError, ["blocks[0] is empty"]),
    "no memory": (lambda: [12], InvalidFieldError, ["blocks[0] is a int"]),
    "text": (lambda: ["text"], InvalidFieldError, ["blocks[0] is a str"]),
    "an empty list of pieces": (lambda: [[]], InvalidFieldError, ["blocks[0]", "pieces"]),
}


@pytest.mark.parametrize("name", BAD_MEMORY)
def test_memory_that_does_not_fit_is_refused_on_both_ways(namespace, name):
    """Checked before anything is reserved or read: a put stores nothing, a get writes nothing."""
    make, error, words = BAD_MEMORY[name]
    for call in (namespace.put, namespace.get):
        with pytest.raises(error) as caught:
            call(keys([9]), make())
        for word in words:
            assert word in str(caught.value), (call.__name__, str(caught.value))
    assert namespace.lookup(keys([9])).outcomes.tolist() == [ItemOutcome.MISS]


@pytest.mark.parametrize(
    "into",
    [
        bytes(BLOCK_BYTES),
        [bytes(BLOCK_BYTES)],
        [memoryview(bytearray(BLOCK_BYTES)).toreadonly()],
        read_only(np.zeros((1, BLOCK_BYTES), np.uint8)),
        [[bytes(100), bytearray(BLOCK_BYTES - 100)]],
    ],
    ids=["bytes", "bytes in a list", "read-only view", "read-only array", "one read-only piece"],
)
def test_read_only_memory_is_no_target(namespace, into):
    """A get never writes where the caller said that nobody may."""
    with pytest.raises(InvalidFieldError, match="into is read-only"):
        namespace.get(keys([0]), into)


BAD_KEYS = {
    "none": (b"", BatchSizeError, "keys is empty"),
    "no keys in a list": ([], BatchSizeError, "keys is empty"),
    "a short key": ([key(9), b"short"], InvalidFieldError, r"keys\[1\] has 5 bytes; a key has 32"),
    "half a key": (key(9)[:31], InvalidFieldError, "keys has 31 bytes"),
    "text": ("text", InvalidFieldError, "keys is a str"),
    "numbers": ([1, 2], InvalidFieldError, r"keys\[0\] is a int"),
    "wide numbers": (np.zeros((1, 32), np.int64), InvalidFieldError, "int64"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_keys_are_refused_everywhere(namespace, name):
    """Every call that takes keys names what is wrong with them."""
    bad, error, words = BAD_KEYS[name]
    block = bytearray(BLOCK_BYTES)
    for call in (
        lambda: namespace.put(bad, [block]),
        lambda: namespace.get(bad, [block]),
        lambda: namespace.lookup(bad),
        lambda: namespace.lookup_local(bad),
        lambda: namespace.reserve(bad),
        lambda: namespace.acquire(bad),
    ):
        with pytest.raises(error, match=words):
            call()


def test_unknown_keys_are_misses_and_not_errors(namespace):
    """A miss is data: a get of some known and some unknown keys says which is which."""
    into = np.zeros((3, BLOCK_BYTES), np.uint8)
    result = namespace.get(keys([0, 99, 1]), into)
    assert result.prefix_count == 1
    assert result.outcomes.tolist()[:2] == [ItemOutcome.HIT, ItemOutcome.MISS]
    assert np.array_equal(into[0], content([0])[0])
    with namespace.lease(keys([99])) as view:
        assert (view.prefix_count, view.views) == (0, [])


def test_a_key_twice_in_one_batch_is_refused(namespace):
    """Two blocks under one key in one put would contradict each other."""
    with pytest.raises(DuplicateKeyError, match=r"keys\[2\] is the same as keys\[0\]"):
        namespace.put(keys([7, 8, 7]), content([7, 8, 7]))
    assert namespace.lookup(keys([7, 8])).outcomes.tolist() == [ItemOutcome.MISS] * 2


def test_a_batch_beyond_the_limit_is_refused(namespace):
    """More keys than limits.max_batch_keys: the bound is named, and splitting is the way out."""
    count = 16_385
    packed = b"".join(keys(range(1000, 1000 + count)))
    for call in (namespace.lookup, namespace.reserve, namespace.acquire):
        with pytest.raises(BatchSizeError, match=r"16384.*split"):
            call(packed)


def test_two_writers_of_one_key_do_not_disturb_each_other(endpoint, client_and_namespace, salt):
    """The second is told PENDING, then ALREADY_COMMITTED; the first one's bytes stand."""
    client, namespace = client_and_namespace
    with opened(endpoint, salt=salt) as (_, other):
        reservation = namespace.reserve(keys([7]))
        late = other.put(keys([7, 8]), content([70, 8]))
        assert late.outcomes.tolist() == [ItemOutcome.PENDING, ItemOutcome.DONE]
        client.commit(reservation, namespace.write(reservation, content([7])))
        again = other.put(keys([7]), content([70]))
        assert again.outcomes.tolist() == [ItemOutcome.ALREADY_COMMITTED]
        assert again.bytes_moved == 0
        check_stored(other, [7, 8])


def test_a_reservation_of_nothing_can_be_ended_like_any_other(client_and_namespace):
    """All keys were there: writing, committing and aborting the empty reservation does nothing, quietly."""
    client, namespace = client_and_namespace
    nothing = namespace.reserve(keys(range(4)))
    assert (nothing.reservation_id, len(nothing.slots)) == (0, 0)
    sums = namespace.write(nothing, content(range(4)))
    assert len(sums) == 0
    assert client.commit(nothing, sums) == 0
    assert client.abort(nothing) in set(ItemOutcome)


def test_a_stranger_can_neither_commit_nor_abort(endpoint, client_and_namespace, salt):
    """A reservation of another engine is refused by name, and its owner goes on."""
    client, namespace = client_and_namespace
    with opened(endpoint, salt=salt) as (stranger, _):
        reservation = namespace.reserve(keys([7]))
        sums = namespace.write(reservation, content([7]))
        for call in (lambda: stranger.commit(reservation, sums), lambda: stranger.abort(reservation)):
            with pytest.raises(NotOwnerError, match=str(reservation.reservation_id)):
                call()
        assert client.commit(reservation, sums) == 1
        check_stored(namespace, [7])


def test_a_stranger_can_neither_read_nor_write_over_the_wire(shared_daemon, client_and_namespace, salt):
    """Over tcp the side with the bytes checks the capability on each transfer."""
    client, namespace = client_and_namespace
    reservation, lease = namespace.reserve(keys([7])), namespace.acquire(keys(range(4)))
    assert lease is not None
    with opened(shared_daemon.grpc, salt=salt) as (_, stranger):
        with pytest.raises(NotOwnerError):
            stranger.write(reservation, content([99]))
        with pytest.raises(NotOwnerError):
            stranger.read(lease, np.zeros((4, BLOCK_BYTES), np.uint8))
    assert client.commit(reservation, namespace.write(reservation, content([7]))) == 1
    client.release([lease])
    check_stored(namespace, [7])


def test_a_commit_after_expiry_is_refused(client_and_namespace):
    """Expired: nothing became visible, and the same keys can be put again."""
    client, namespace = client_and_namespace
    reservation = namespace.reserve(keys([7]), ttl_s=0.2)
    sums = namespace.write(reservation, content([7]))
    until_passed(0.3)
    with pytest.raises(ReservationExpiredError, match="reserve again"):
        client.commit(reservation, sums)
    assert namespace.lookup(keys([7])).outcomes.tolist() == [ItemOutcome.MISS]
    assert namespace.put(keys([7]), content([7])).stored_count == 1
    check_stored(namespace, [7])


def test_a_commit_with_checksums_of_other_bytes_is_refused_over_the_wire(shared_daemon, salt):
    """What arrived over tcp is held to what the writer says that it sent."""
    with opened(shared_daemon.grpc, salt=salt) as (client, namespace):
        reservation = namespace.reserve(keys([7]))
        sums = namespace.write(reservation, content([7]))
        with pytest.raises(ChecksumMismatchError, match="write it again"):
            client.commit(reservation, sums ^ np.uint32(1))
        assert client.commit(reservation, sums) == 1
        check_stored(namespace, [7])


def put_wrong(shared_daemon, salt):
    """Store block 7 with the checksum of other bytes, as if its memory had been altered since."""
    with opened(shared_daemon.lane, salt=salt) as (writer, blocks):
        reservation = blocks.reserve(keys([7]))
        sums = blocks.write(reservation, content([7]))
        writer.commit(reservation, sums ^ np.uint32(1))


def read_all(namespace, how: str, numbers) -> None:
    """Read blocks by one of the ways that copy."""
    getattr(namespace, how)(keys(numbers), np.zeros((len(numbers), BLOCK_BYTES), np.uint8))


@pytest.mark.parametrize("how", ["get", "get_located", "get_leased"])
def test_bytes_that_are_not_those_committed_are_never_handed_on(endpoint, salt, shared_daemon, how):
    """Not even once more: the daemon looks for itself, and drops that block alone."""
    put_wrong(shared_daemon, salt)
    with opened(endpoint, salt=salt) as (_, namespace):
        namespace.put(keys([6]), content([6]))
        with pytest.raises(ChecksumMismatchError):
            read_all(namespace, how, [6, 7])
        until(lambda: namespace.lookup(keys([7])).outcomes.tolist() == [ItemOutcome.MISS], "the block to go")
        check_stored(namespace, [6])
        namespace.put(keys([7]), content([7]))
        check_stored(namespace, [6, 7])


def test_a_verified_lease_of_altered_bytes_is_refused(endpoint, salt, shared_daemon):
    """The context is not entered, and `verify` drops the block."""
    put_wrong(shared_daemon, salt)
    with opened(endpoint, salt=salt) as (_, namespace):
        with pytest.raises(ChecksumMismatchError), namespace.lease(keys([7]), verify=True):
            pytest.fail("the context was entered")
        assert namespace.verify(keys([7])).outcomes.tolist() == [ItemOutcome.MISS]
        assert namespace.put(keys([7]), content([7])).stored_count == 1
        assert namespace.verify(keys([7])).prefix_count == 1


def test_a_request_id_with_other_keys_is_refused(namespace, client_and_namespace):
    """A retry is a retry of the same."""
    client, _ = client_and_namespace
    request_id = b"r" * 16
    first = namespace.reserve(keys([7]), request_id=request_id)
    assert namespace.reserve(keys([7]), request_id=request_id).reservation_id == first.reservation_id
    with pytest.raises(RequestIdReusedError, match=request_id.hex()):
        namespace.reserve(keys([8]), request_id=request_id)
    with pytest.raises(InvalidFieldError, match="request_id has 3 bytes"):
        namespace.reserve(keys([8]), request_id=b"abc")
    client.abort(first)


def test_a_block_larger_than_a_segment_is_refused_at_the_opening(endpoint):
    """It could never be stored, so it is not asked for later: size, bound and way out are named."""
    with opened(endpoint) as (client, _):
        size = (1 << 20) + 1
        with pytest.raises(BlockSizeError, match=f"block_bytes = {size}.*{1 << 20}.*segment"):
            client.open_namespace(identity(), parts(size))


def test_one_part_has_one_size(endpoint, salt):
    """Another size for the same part and shape is refused, and the open namespace works on."""
    with opened(endpoint, 4096, salt=salt) as (client, namespace):
        with pytest.raises(BlockSizeError, match="8192"):
            client.open_namespace(identity(), parts(8192), salt)
        namespace.put(keys([1]), content([1], 4096))
        check_stored(namespace, [1], 4096)


def test_bad_settings_of_a_client_are_named(shared_daemon, tmp_path):
    """Endpoint, name, incarnation and time-outs are checked before anything is sent."""
    for fields, words in (
        ({"endpoint": "http://x"}, "endpoint is 'http://x'"),
        ({"endpoint": "grpc://host"}, "grpc://host:port"),
        ({"endpoint": shared_daemon.lane, "client_name": "n" * 129}, "client_name has 129"),
        ({"endpoint": shared_daemon.lane, "engine_incarnation": b"x"}, "engine_incarnation has 1"),
        ({"endpoint": shared_daemon.lane, "call_timeout_s": 0.0}, "call_timeout_s is 0"),
    ):
        with pytest.raises(InvalidFieldError, match=words):
            ClientSettings(**fields)
    for endpoint in (f"unix:{tmp_path}/nobody.sock", "grpc://127.0.0.1:1"):
        with pytest.raises(PeerUnavailableError):
            KvClient.connect(settings_of(endpoint, connect_timeout_s=2.0))


def test_raw_addresses_that_contradict_each_other_are_refused():
    """What can be checked of raw addresses is checked."""
    with pytest.raises(InvalidFieldError, match="lengths"):
        BlockBuffers.from_addresses([1, 2], [3])
    pool = np.zeros((4, 16), np.uint8)
    with pytest.raises(InvalidFieldError, match="block_ids reach from 0 to 4"):
        BlockBuffers.strided([pool], [0, 4])
    with pytest.raises(InvalidFieldError, match="-1"):
        BlockBuffers.strided([pool], [-1])


def test_a_client_that_was_closed_says_so(shared_daemon, salt):
    """Use after close is an error with a way out, not a hang."""
    with opened(shared_daemon.lane, salt=salt) as (client, namespace):
        assert tier(client)
    with pytest.raises(PeerUnavailableError, match="closed"):
        namespace.lookup(keys([1]))
