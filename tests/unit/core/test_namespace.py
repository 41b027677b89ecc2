"""Namespaces and the table of open spaces."""

import dataclasses
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import (
    BlockSizeError,
    InvalidFieldError,
    InvariantError,
    LimitReachedError,
    SpaceNotOpenError,
)
from kvservice.core.namespace import SpaceKey, Spaces, namespace_id
from kvservice.core.representation import Part, Shape
from kvservice.core.slots import GRANULE_BYTES

SERVER_KEY = bytes(range(16))
DIGEST = bytes(range(32))
PART = Part(
    layers_count=1,
    heads_count=1,
    shape=Shape(dtype="bfloat16", kv_packing="packed", block_tokens=16),
    block_bytes=1000,
)


def derive(tenant="acme", *, identity_digest=DIGEST, salt=b"salt", server_key=SERVER_KEY):
    """Derive a namespace from this file's examples."""
    return namespace_id(tenant, identity_digest=identity_digest, salt=salt, server_key=server_key)


def test_a_namespace_id_is_fixed():
    """Golden bytes: HMAC-SHA256 of the canonical encoding, drawn here by hand."""
    message = (
        b"\x01"
        + bytes.fromhex("01 04 02 04 00 00 00")
        + b"acme"
        + bytes.fromhex("02 04 03 20 00 00 00")
        + DIGEST
        + bytes.fromhex("03 04 03 04 00 00 00")
        + b"salt"
    )
    assert derive() == hmac.new(SERVER_KEY, message, hashlib.sha256).digest()
    assert derive().hex() == "d6d487aa918ed0c7c6adcad0f150ba60ac2702afcf4003df51ebdfb09b7581de"


def test_every_input_of_a_namespace_counts():
    """Another tenant, identity, salt or server key is another namespace."""
    other = bytes(32)
    found = {
        derive(),
        derive("acm"),
        derive(identity_digest=other),
        derive(salt=b""),
        derive(server_key=other),
    }
    assert len(found) == 5


@given(st.lists(st.tuples(st.text(min_size=1), st.binary(max_size=256)), min_size=2, max_size=2, unique=True))
def test_tenant_and_salt_do_not_run_into_each_other(pairs):
    """Lengths are part of what is hashed: ("ab", "c") is not ("a", "bc")."""
    first, second = (derive(tenant, salt=salt) for tenant, salt in pairs)
    assert first != second


def test_a_salt_has_at_most_256_bytes():
    """The bound of the protocol is kept where the salt is used."""
    assert len(derive(salt=b"x" * 256)) == 32
    with pytest.raises(InvalidFieldError, match=r"salt of 257 bytes: allowed is 0\.\.256"):
        derive(salt=b"x" * 257)


@pytest.mark.parametrize(
    "changes", [{"tenant": ""}, {"identity_digest": bytes(31)}, {"server_key": bytes(15)}]
)
def test_what_the_daemon_supplies_must_be_whole(changes):
    """An empty tenant, a short digest or a weak key is a bug of ours, not of the client."""
    with pytest.raises(InvariantError):
        derive(**changes)


def test_opening_twice_gives_the_same_space():
    """A space is interned: equal values, built apart, have one id; ids count from 1."""
    spaces = Spaces()
    first = spaces.open(DIGEST, tenant="acme", part=PART)
    again = spaces.open(bytes(DIGEST), tenant="acme", part=dataclasses.replace(PART))
    assert again is first
    assert (first.id, len(spaces), spaces.get(1)) == (1, 1, first)


def test_a_space_says_all_that_allocation_needs():
    """The record carries owner, part, key and sizes."""
    space = Spaces().open(DIGEST, tenant="acme", part=PART)
    key = SpaceKey(namespace_id=DIGEST, part_key=PART.key(), shape_digest=PART.shape.digest())
    assert (space.key, space.namespace_id, space.tenant, space.part) == (key, DIGEST, "acme", PART)
    assert (space.block_bytes, space.slot_bytes) == (1000, 1024)


@given(st.integers(1, 2**63))
def test_a_slot_is_a_block_rounded_up_to_granules(block_bytes):
    """Slots begin and end at granules, and waste less than one."""
    part = dataclasses.replace(PART, block_bytes=block_bytes)
    space = Spaces().open(DIGEST, tenant="acme", part=part)
    assert space.slot_bytes % GRANULE_BYTES == 0
    assert 0 <= space.slot_bytes - block_bytes < GRANULE_BYTES


@pytest.mark.parametrize(
    "change",
    [{"kv_group": 1}, {"first_layer": 1}, {"shape": dataclasses.replace(PART.shape, dtype="float16")}],
)
def test_another_part_or_shape_is_another_space(change):
    """Keys never meet across parts, shapes or namespaces."""
    spaces = Spaces()
    first = spaces.open(DIGEST, tenant="acme", part=PART)
    assert spaces.open(DIGEST, tenant="acme", part=dataclasses.replace(PART, **change)).id != first.id
    assert spaces.open(bytes(32), tenant="acme", part=PART).id != first.id


def test_the_same_space_has_one_block_size():
    """Two processes that disagree about a block's size would read past each other's bytes."""
    spaces = Spaces()
    spaces.open(DIGEST, tenant="acme", part=PART)
    with pytest.raises(BlockSizeError, match=r"block_bytes = 1001: space 1 .* open with 1000"):
        spaces.open(DIGEST, tenant="acme", part=dataclasses.replace(PART, block_bytes=1001))
    assert len(spaces) == 1


def test_a_namespace_has_one_tenant():
    """The id is derived from the tenant, so another tenant with it is a bug."""
    spaces = Spaces()
    spaces.open(DIGEST, tenant="acme", part=PART)
    with pytest.raises(InvariantError):
        spaces.open(DIGEST, tenant="other", part=PART)


def test_an_unknown_id_finds_nothing():
    """An id of nobody's answers SPACE_NOT_OPEN, whatever number it is."""
    spaces = Spaces()
    spaces.open(DIGEST, tenant="acme", part=PART)
    for space_id in (0, -1, 2, 2**32 - 1):
        with pytest.raises(SpaceNotOpenError, match=f"space {space_id} is not open"):
            spaces.get(space_id)


def test_spaces_are_bounded():
    """Full is an answer with a hint, not growth; what is open stays open to all."""
    spaces = Spaces(max_spaces=2)
    for namespace in (b"a" * 32, b"b" * 32):
        spaces.open(namespace, tenant="acme", part=PART)
    with pytest.raises(LimitReachedError, match="2 spaces are open") as caught:
        spaces.open(b"c" * 32, tenant="acme", part=PART)
    assert caught.value.retry_after_ms == 1000
    assert spaces.open(b"a" * 32, tenant="acme", part=PART).id == 1


def test_an_id_is_never_reused():
    """A space that was forgotten and opened again is another one: stale ids find nothing."""
    spaces = Spaces(max_spaces=1)
    first = spaces.open(DIGEST, tenant="acme", part=PART)
    assert spaces.discard(first.id)
    second = spaces.open(DIGEST, tenant="acme", part=PART)
    assert second.id == 2
    with pytest.raises(SpaceNotOpenError):
        spaces.get(first.id)


def test_forgetting_twice_changes_nothing():
    """Late and repeated ends are harmless everywhere in the service."""
    spaces = Spaces()
    first = spaces.open(DIGEST, tenant="acme", part=PART)
    assert spaces.discard(first.id)
    spaces.open(DIGEST, tenant="acme", part=PART)
    assert not spaces.discard(first.id)
    assert [space.id for space in spaces] == [2]
