"""The canonical encoding and the representation values that are encoded by it."""

import dataclasses
import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.kv.v1 import representation_pb2
from kvservice.core import canonical
from kvservice.core.canonical import Family, Field
from kvservice.core.errors import BlockSizeError, InvalidFieldError, InvariantError
from kvservice.core.representation import Identity, Part, Shape, check_part

IDENTITY = Identity(
    model_id="Qwen/Qwen2.5-0.5B",
    weights_revision="060db6499f32faf8b98477b0a26969ef7d8b9987",
    lora="",
    rope="default:1000000",
    attention_kind="gqa",
    layers_count=24,
    kv_heads_count=2,
    k_head_dim=64,
    v_head_dim=64,
    hash_algorithm="sha256_cbor",
    hash_seed="0",
    hash_tokens=16,
    tokenizer="é",
)
SHAPE = Shape(
    dtype="bfloat16",
    quantisation="",
    kv_packing="packed",
    dimension_order="LBHNC",
    strides_bytes=(2**40, 8192, 4096, 256, 2),
    block_tokens=32,
    attention_backend="FLASH_ATTN",
    tensor_parallel_rank=1,
    tensor_parallel_size=2,
    pipeline_parallel_rank=0,
    pipeline_parallel_size=1,
)
PART = Part(
    kv_group=0, first_layer=0, layers_count=24, first_head=1, heads_count=1, shape=SHAPE, block_bytes=196608
)

OPTIONAL_TEXTS = ("lora", "rope", "attention_kind", "hash_algorithm", "hash_seed", "tokenizer")

numbers = st.integers(0, 2**64 - 1)
values = st.one_of(numbers, st.text(), st.binary(), st.lists(numbers).map(tuple))
field_lists = st.dictionaries(st.integers(1, 255), values, max_size=6).map(
    lambda found: [Field(number, found[number]) for number in sorted(found)]
)


def decode(encoding: bytes) -> tuple[Family, list[Field]]:
    """Read an encoding back, by its drawing and with none of its code."""
    assert encoding[0] == 1
    family, fields, position = Family.IDENTITY, [], 1
    while position < len(encoding):
        tag, kind, length = struct.unpack_from("<HBI", encoding, position)
        payload = encoding[position + 7 : position + 7 + length]
        position += 7 + length
        found = struct.unpack(f"<{length // 8}Q", payload) if kind in {1, 4} else ()
        family = Family(tag >> 8)
        value = {1: found[:1], 2: payload, 3: payload, 4: found}[kind]
        value = value[0] if kind == 1 else payload.decode() if kind == 2 else value
        fields.append(Field(tag & 0xFF, value))
    return family, fields


@given(st.sampled_from(Family), field_lists.filter(bool))
def test_the_encoding_is_injective(family, fields):
    """What can be read back to the same value and type is shared by no two values."""
    read_family, read_fields = decode(canonical.encode(family, fields))
    assert read_family is family
    assert read_fields == fields
    assert [type(field.value) for field in read_fields] == [type(field.value) for field in fields]


def test_the_encoding_is_as_drawn():
    """The bytes of each type are fixed: digests of them live in clients, tiers and logs."""
    fields = [
        Field(1, 2**64 - 1),
        Field(2, "é"),
        Field(3, b"\0\xff"),
        Field(255, (1, 256)),
    ]
    assert canonical.encode(Family.SHAPE, fields).hex(" ") == (
        "01 "
        "01 02 01 08 00 00 00 ff ff ff ff ff ff ff ff "
        "02 02 02 02 00 00 00 c3 a9 "
        "03 02 03 02 00 00 00 00 ff "
        "ff 02 04 10 00 00 00 01 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00"
    )
    assert canonical.encode(Family.NAMESPACE, []) == b"\x01"


@pytest.mark.parametrize("value", [-1, 2**64, True, (1, -1), (2**64,), (False,), "\ud800"])
def test_a_value_without_an_exact_encoding_is_refused(value):
    """A number that would wrap, a bool that looks like 1, or half a character is never encoded."""
    with pytest.raises(InvalidFieldError):
        canonical.encode(Family.PART, [Field(1, value)])


def test_a_payload_is_bounded():
    """A length always fits its u32, with the bound itself inside."""
    assert canonical.encode(Family.PART, [Field(1, bytes(2**20))])
    with pytest.raises(InvalidFieldError, match=r"a field of 1048577 bytes: allowed is 0\.\.1048576"):
        canonical.encode(Family.PART, [Field(1, bytes(2**20 + 1))])


@pytest.mark.parametrize("field_numbers", [(0,), (256,), (2, 1), (1, 1)])
def test_fields_come_once_and_in_order(field_numbers):
    """One value has one encoding: a caller cannot permute or repeat fields."""
    with pytest.raises(InvariantError):
        canonical.encode(Family.PART, [Field(number, 0) for number in field_numbers])


def test_text_is_not_normalised():
    """Two spellings of a name are two names: folding them could serve the wrong KV."""
    composed, decomposed = (dataclasses.replace(IDENTITY, tokenizer=text) for text in ("é", "e\u0301"))
    assert composed.digest() != decomposed.digest()


@pytest.mark.parametrize(
    ("value_type", "message"),
    [
        (Identity, representation_pb2.Identity),
        (Shape, representation_pb2.Shape),
        (Part, representation_pb2.Part),
    ],
)
def test_values_have_the_fields_of_the_protocol(value_type, message):
    """Names, order and numbers are those of representation.proto: tags are built of them."""
    declared = [(field.name, field.number) for field in message.DESCRIPTOR.fields]
    assert declared == [(field.name, n) for n, field in enumerate(dataclasses.fields(value_type), start=1)]


def test_the_digests_are_fixed():
    """Golden digests: a change of these makes every block of every running cluster a miss."""
    assert IDENTITY.digest().hex() == "201dcecc33f7468b8ebf69f5870b10475298556d65fea67e43cbd4eca581738d"
    assert SHAPE.digest().hex() == "e3eaef400df866e2334268e6167faf5f4f71c6015fcfe8af39c8e059f4bc3e49"
    assert IDENTITY.digest() == hashlib.sha256(IDENTITY.encode()).digest()


def test_the_encodings_are_fixed():
    """Golden bytes of the smallest values, and of a part's key."""
    identity = Identity(
        model_id="m", weights_revision="r", layers_count=1, kv_heads_count=2, k_head_dim=3, hash_tokens=4
    )
    assert identity.encode().hex() == (
        "01010102010000006d020102010000007203010200000000040102000000000501020000000006010108000000010000"
        "000000000007010108000000020000000000000008010108000000030000000000000009010108000000000000000000"
        "00000a0102000000000b0102000000000c01010800000004000000000000000d010200000000"
    )
    shape = Shape(dtype="f", kv_packing="opaque", block_tokens=4)
    assert shape.encode().hex() == (
        "01010202010000006602020200000000030202060000006f706171756504020200000000050204000000000602010800"
        "00000400000000000000070202000000000802010800000000000000000000000902010800000001000000000000000a"
        "02010800000000000000000000000b0201080000000100000000000000"
    )
    assert PART.key().hex() == (
        "010103010800000000000000000000000203010800000000000000000000000303010800000018000000000000000403"
        "01080000000100000000000000050301080000000100000000000000"
    )


@pytest.mark.parametrize("value", [IDENTITY, SHAPE], ids=["identity", "shape"])
def test_every_field_counts(value):
    """A change of any one field changes the digest."""
    digests = {value.digest()}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = {int: lambda old: old + 1, str: lambda old: old + "x", tuple: lambda old: (*old[:-1], 1)}[
            type(old)
        ](old)
        if field.name == "kv_packing":
            new = "split"
        elif field.name == "dimension_order":
            new = "BLHNC"
        elif field.name.endswith("_rank"):
            new = 1 - old
            if field.name.startswith("pipeline"):
                continue  # a rank of 1 needs a size of 2: covered by the size
        digests.add(dataclasses.replace(value, **{field.name: new}).digest())
    skipped = 1 if value is SHAPE else 0
    assert len(digests) == 1 + len(dataclasses.fields(value)) - skipped


def test_a_part_key_says_what_is_held_and_not_how_it_lies():
    """Shape and size are no part of the key; group, layers and heads are."""
    other_shape = dataclasses.replace(SHAPE, dtype="float16")
    assert dataclasses.replace(PART, shape=other_shape, block_bytes=1).key() == PART.key()
    changed = {
        dataclasses.replace(PART, **{name: getattr(PART, name) + 1}).key()
        for name in ("kv_group", "first_layer", "layers_count", "first_head", "heads_count")
    }
    assert len(changed | {PART.key()}) == 6


@pytest.mark.parametrize(
    ("value", "change", "message"),
    [
        *((IDENTITY, {name: ""}, f"identity.{name} = ''") for name in ("model_id", "weights_revision")),
        *(
            (IDENTITY, {name: "x" * 513}, f"identity.{name} of 513 characters")
            for name in (*OPTIONAL_TEXTS, "model_id", "weights_revision")
        ),
        (IDENTITY, {"lora": "\udcff"}, "identity.lora = '\\udcff'"),
        (IDENTITY, {"rope": b"x"}, "identity.rope = b'x'"),
        *(
            (IDENTITY, {name: bad}, f"identity.{name} = {bad}: allowed is 1..4294967295")
            for name in ("layers_count", "kv_heads_count", "k_head_dim", "hash_tokens")
            for bad in (0, -1, 2**32, True)
        ),
        (IDENTITY, {"v_head_dim": -1}, "identity.v_head_dim = -1: allowed is 0..4294967295"),
        (SHAPE, {"dtype": ""}, "shape.dtype = ''"),
        (SHAPE, {"quantisation": "x" * 513}, "shape.quantisation of 513"),
        (SHAPE, {"attention_backend": "x" * 513}, "shape.attention_backend of 513"),
        (SHAPE, {"kv_packing": "Packed"}, "one of packed, split, interleaved, latent, opaque"),
        (SHAPE, {"dimension_order": "L" * 17}, "at most 16 letters"),
        (SHAPE, {"dimension_order": "LBHN"}, "strides_bytes has 5 entries: allowed is none, or one"),
        (SHAPE, {"strides_bytes": (1,)}, "strides_bytes has 1 entries"),
        (SHAPE, {"strides_bytes": (1, 2, 3, 4, -5)}, "shape.strides_bytes = -5"),
        (SHAPE, {"strides_bytes": (1, 2, 3, 4, 2**64)}, "shape.strides_bytes = 18446744073709551616"),
        (SHAPE, {"strides_bytes": [1, 2, 3, 4, 5]}, "a tuple of numbers"),
        (SHAPE, {"block_tokens": 0}, "shape.block_tokens = 0: allowed is 1..4294967295"),
        (SHAPE, {"tensor_parallel_size": 0}, "shape.tensor_parallel_size = 0"),
        (SHAPE, {"tensor_parallel_rank": 2}, "shape.tensor_parallel_rank = 2: allowed is 0..1"),
        (SHAPE, {"pipeline_parallel_size": 0}, "shape.pipeline_parallel_size = 0"),
        (SHAPE, {"pipeline_parallel_rank": 1}, "shape.pipeline_parallel_rank = 1: allowed is 0..0"),
        (PART, {"kv_group": -1}, "part.kv_group = -1"),
        (PART, {"first_layer": 2**32}, "part.first_layer = 4294967296"),
        (PART, {"layers_count": 0}, "part.layers_count = 0: allowed is 1.."),
        (PART, {"first_head": -1}, "part.first_head = -1"),
        (PART, {"heads_count": 0}, "part.heads_count = 0: allowed is 1.."),
        (PART, {"shape": None}, "part.shape = None"),
    ],
)
def test_a_field_outside_its_range_is_refused(value, change, message):
    """A value that exists is valid; the error names the field, the value and what is allowed."""
    with pytest.raises(InvalidFieldError) as caught:
        dataclasses.replace(value, **change)
    assert message in caught.value.message


@pytest.mark.parametrize("block_bytes", [0, -1, 2**64, True])
def test_a_block_has_a_size(block_bytes):
    """A block of no bytes, or of more than a u64, has its own reason."""
    with pytest.raises(BlockSizeError, match=r"part\.block_bytes = "):
        dataclasses.replace(PART, block_bytes=block_bytes)


def test_the_longest_text_and_the_largest_numbers_are_allowed():
    """Bounds are inclusive, and an optional text or stride list may be empty."""
    assert dataclasses.replace(IDENTITY, model_id="é" * 512, layers_count=2**32 - 1).digest()
    assert dataclasses.replace(SHAPE, strides_bytes=(), dimension_order="").digest()
    assert dataclasses.replace(SHAPE, strides_bytes=(0, 0, 0, 0, 2**64 - 1)).digest()


def check(identity_changes=None, shape_changes=None, max_block_bytes=196608, **part_changes):
    """Check the part of this file's examples after some changes."""
    shape = dataclasses.replace(SHAPE, **(shape_changes or {}))
    part = dataclasses.replace(PART, shape=shape, **part_changes)
    check_part(dataclasses.replace(IDENTITY, **(identity_changes or {})), part, max_block_bytes)


def test_a_part_that_fits_its_model_is_accepted():
    """The last layer, the last head and a block of exactly a segment are inside."""
    check()
    check(first_layer=23, layers_count=1)
    with pytest.raises(BlockSizeError):
        check(max_block_bytes=196607)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shape_changes": {"block_tokens": 24}},
            "shape.block_tokens = 24: allowed is a multiple of identity.hash_tokens = 16",
        ),
        ({"shape_changes": {"block_tokens": 8}}, "shape.block_tokens = 8"),
        ({"first_layer": 1}, "part.first_layer + part.layers_count = 1 + 24: allowed is at most 24"),
        ({"layers_count": 25}, "0 + 25: allowed is at most 24, the layers"),
        ({"heads_count": 2}, "part.first_head + part.heads_count = 1 + 2: allowed is at most 2"),
        ({"first_head": 2**32 - 1}, "4294967295 + 1: allowed is at most 2, the heads"),
    ],
)
def test_a_part_outside_its_model_is_refused(changes, message):
    """Blocks are whole hash units, and a part's layers and heads are the model's."""
    with pytest.raises(InvalidFieldError) as caught:
        check(**changes)
    assert message in caught.value.message


def test_a_block_larger_than_a_segment_says_what_to_do():
    """A slot lies in one segment; the message names the size, the bound and the setting."""
    with pytest.raises(BlockSizeError) as caught:
        check(max_block_bytes=65536)
    assert "part.block_bytes = 196608: allowed is 1..65536" in caught.value.message
    assert "arena.segment_bytes" in caught.value.message
