import struct

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.core.errors import MalformedError
from kvservice.native import ucx
from tests.integration.ucx.peers import TCP, anonymous_memory

ADDRESS, RKEY = 1, 2


@pytest.fixture(scope="module")
def pair(library):
    """Give a worker, an endpoint to itself, and a registration."""
    with ucx.Worker(TCP) as worker:
        memory = anonymous_memory(4096)
        registration = worker.register(memory.ctypes.data, memory.size)
        yield worker, worker.connect(worker.address, is_watched=True), registration


def seal(kind, body, *, magic=b"KVUX", layout=1):
    """Make an envelope as envelope.h draws it."""
    major, minor, _ = (int(part) for part in ucx.library_version().split("."))
    head = magic + struct.pack("<4BI", layout, kind, major, minor, len(body))
    return head + struct.pack("<I", google_crc32c.value(head + body)) + body


def test_the_layout_is_as_drawn(pair):
    """Both kinds, byte for byte: other languages and versions read them."""
    worker, _, registration = pair
    for kind, sealed in ((ADDRESS, worker.address), (RKEY, registration.rkey)):
        assert sealed == seal(kind, sealed[16:])
    assert struct.unpack_from("<QQ", registration.rkey, 16) == (registration.address, 4096)


def check_refused(pair, sealed):
    """Check that neither door takes it."""
    worker, endpoint, registration = pair
    with pytest.raises(MalformedError):
        worker.connect(sealed, is_watched=True)
    with pytest.raises(MalformedError):
        endpoint.attach(sealed, registration.address, 4096)


def test_each_kind_of_damage_is_refused(pair):
    """What is cut short, too long, of the other kind, or of another layout never reaches UCX."""
    worker, endpoint, registration = pair
    for cut in range(len(worker.address)):
        check_refused(pair, worker.address[:cut])
    for sealed in (
        worker.address + b"\0",
        seal(ADDRESS, worker.address[16:], layout=2),
        seal(ADDRESS, worker.address[16:], magic=b"KVUY"),
        seal(3, worker.address[16:]),
        seal(ADDRESS, b""),
        seal(RKEY, bytes(16)),
        seal(ADDRESS, bytes(65537)),
    ):
        check_refused(pair, sealed)
    with pytest.raises(MalformedError, match="other kind"):
        worker.connect(registration.rkey, is_watched=True)
    with pytest.raises(MalformedError, match="other kind"):
        endpoint.attach(worker.address, registration.address, 4096)
    for wrong in (bytearray(worker.address), worker.address.hex(), None):
        with pytest.raises(TypeError):
            worker.connect(wrong, is_watched=True)


@given(data=st.data())
@settings(max_examples=300)
def test_random_bytes_and_flipped_bits_are_refused(pair, data):
    """Neither random bytes nor a real envelope with some bits changed get past the checksum."""
    worker, _, registration = pair
    real = data.draw(st.sampled_from([worker.address, registration.rkey]))
    if data.draw(st.booleans()):
        check_refused(pair, data.draw(st.binary(max_size=300)))
        return
    damaged = bytearray(real)
    for bit in data.draw(st.sets(st.integers(0, 8 * len(real) - 1), min_size=1, max_size=5)):
        damaged[bit // 8] ^= 1 << (bit % 8)
    check_refused(pair, bytes(damaged))
