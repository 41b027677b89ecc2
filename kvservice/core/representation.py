"""How the bytes of a block are to be read: which KV it is, and how it lies in memory.

The values mirror `kv/v1/representation.proto` field by field; they check themselves
when built, so whoever holds one holds a valid one. Only what concerns an identity and
a part together is checked by `check_part`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NoReturn

from kvservice.core import canonical
from kvservice.core.canonical import U32_MAX, U64_MAX, Family, Field
from kvservice.core.errors import BlockSizeError, InvalidFieldError

MAX_TEXT_CHARACTERS = 512
"""Names and digests are shorter; a bound keeps what one request can store small."""

MAX_DIMENSIONS = 16
"""More than any layout has (the deepest known has 7)."""

KV_PACKINGS = ("packed", "split", "interleaved", "latent", "opaque")
"""How K and V may lie; closed, since a misspelt word would be a silent miss for ever."""

_PART_KEY_FIELDS_COUNT = 5
"""The fields of `Part` from `kv_group` to `heads_count`: what is held, not how it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which numbers the KV holds. Producers that differ in any field never share a block.

    Dimensions are in elements, `hash_tokens` in tokens; layers and heads are those of
    the whole model. `model_id` and `weights_revision` are never empty.
    """

    model_id: str
    weights_revision: str
    lora: str = ""
    rope: str = ""
    attention_kind: str = ""
    layers_count: int
    kv_heads_count: int
    k_head_dim: int
    v_head_dim: int = 0
    hash_algorithm: str = ""
    hash_seed: str = ""
    hash_tokens: int
    tokenizer: str = ""

    def __post_init__(self) -> None:
        """Check every field."""
        _check_required("identity.model_id", self.model_id)
        _check_required("identity.weights_revision", self.weights_revision)
        for name in ("lora", "rope", "attention_kind", "hash_algorithm", "hash_seed", "tokenizer"):
            _check_text(f"identity.{name}", getattr(self, name))
        for name in ("layers_count", "kv_heads_count", "k_head_dim", "hash_tokens"):
            _check_number(f"identity.{name}", getattr(self, name), low=1)
        _check_number("identity.v_head_dim", self.v_head_dim)

    def encode(self) -> bytes:
        """Return the canonical encoding of all fields."""
        return _encode(Family.IDENTITY, self)

    def digest(self) -> bytes:
        """Return the 32-byte SHA-256 of the canonical encoding."""
        return canonical.digest(self.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the bytes of one part's block lie. Two shapes are equal in every field, or differ.

    `strides_bytes` is empty, or has one entry for each letter of `dimension_order`.
    """

    dtype: str
    quantisation: str = ""
    kv_packing: str
    dimension_order: str = ""
    strides_bytes: tuple[int, ...] = ()
    block_tokens: int
    attention_backend: str = ""
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Check every field."""
        _check_required("shape.dtype", self.dtype)
        for name in ("quantisation", "kv_packing", "dimension_order", "attention_backend"):
            _check_text(f"shape.{name}", getattr(self, name))
        if self.kv_packing not in KV_PACKINGS:
            _refuse("shape.kv_packing", self.kv_packing, f"one of {', '.join(KV_PACKINGS)}")
        _check_strides(self.strides_bytes, self.dimension_order)
        _check_number("shape.block_tokens", self.block_tokens, low=1)
        for kind in ("tensor", "pipeline"):
            size = getattr(self, f"{kind}_parallel_size")
            _check_number(f"shape.{kind}_parallel_size", size, low=1)
            rank = getattr(self, f"{kind}_parallel_rank")
            _check_number(f"shape.{kind}_parallel_rank", rank, high=size - 1)

    def encode(self) -> bytes:
        """Return the canonical encoding of all fields."""
        return _encode(Family.SHAPE, self)

    def digest(self) -> bytes:
        """Return the 32-byte SHA-256 of the canonical encoding."""
        return canonical.digest(self.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A KV group with the layers and heads that one block holds, and how its bytes lie."""

    kv_group: int = 0
    first_layer: int = 0
    layers_count: int
    first_head: int = 0
    heads_count: int
    shape: Shape
    block_bytes: int

    def __post_init__(self) -> None:
        """Check every field by itself; `check_part` holds it against the identity."""
        for name in ("kv_group", "first_layer", "first_head"):
            _check_number(f"part.{name}", getattr(self, name))
        for name in ("layers_count", "heads_count"):
            _check_number(f"part.{name}", getattr(self, name), low=1)
        if not isinstance(self.shape, Shape):
            _refuse("part.shape", self.shape, "a shape, which is required")
        if type(self.block_bytes) is not int or not 1 <= self.block_bytes <= U64_MAX:
            raise BlockSizeError(f"part.block_bytes = {self.block_bytes!r}: allowed is 1..{U64_MAX}")

    def key(self) -> bytes:
        """Return the canonical key of what is held: group, layers, heads; not how it lies."""
        return _encode(Family.PART, self, fields_count=_PART_KEY_FIELDS_COUNT)


def check_part(identity: Identity, part: Part, max_block_bytes: int) -> None:
    """Check that `part` is a part of `identity`'s model and that a segment can hold its block.

    Raises:
        InvalidFieldError: blocks that are not whole hash units; layers or heads that the
            model does not have.
        BlockSizeError: a block of more than `max_block_bytes`.

    """
    block_tokens = part.shape.block_tokens
    if block_tokens % identity.hash_tokens:
        # A block is named by the key of its last hash unit, so it must end where a unit does.
        _refuse(
            "shape.block_tokens", block_tokens, f"a multiple of identity.hash_tokens = {identity.hash_tokens}"
        )
    _check_range(part.first_layer, part.layers_count, of=identity.layers_count, noun="layer")
    _check_range(part.first_head, part.heads_count, of=identity.kv_heads_count, noun="head")
    if part.block_bytes > max_block_bytes:
        raise BlockSizeError(
            f"part.block_bytes = {part.block_bytes}: allowed is 1..{max_block_bytes}, one segment; "
            "declare smaller parts or blocks, or raise arena.segment_bytes"
        )


def _encode(family: Family, value: Identity | Shape | Part, *, fields_count: int | None = None) -> bytes:
    """Encode the first `fields_count` fields (None: all), numbered as declared, which is as in the proto."""
    names = [field.name for field in fields(value)][:fields_count]
    return canonical.encode(
        family, (Field(number, getattr(value, name)) for number, name in enumerate(names, start=1))
    )


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidFieldError(f"{name} = {value!r}: allowed is {allowed}")


def _check_text(name: str, value: str) -> None:
    if type(value) is not str:
        _refuse(name, value, "text")
    if len(value) > MAX_TEXT_CHARACTERS:
        raise InvalidFieldError(
            f"{name} of {len(value)} characters: allowed is at most {MAX_TEXT_CHARACTERS}; "
            "send a digest of it"
        )
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        _refuse(name, value, "valid Unicode, without lone surrogates")


def _check_required(name: str, value: str) -> None:
    _check_text(name, value)
    if not value:
        _refuse(name, value, f"1..{MAX_TEXT_CHARACTERS} characters; it is required")


def _check_number(name: str, value: int, *, low: int = 0, high: int = U32_MAX) -> None:
    if type(value) is not int or not low <= value <= high:
        _refuse(name, value, f"{low}..{high}")


def _check_strides(strides_bytes: tuple[int, ...], dimension_order: str) -> None:
    if len(dimension_order) > MAX_DIMENSIONS:
        _refuse("shape.dimension_order", dimension_order, f"at most {MAX_DIMENSIONS} letters")
    if type(strides_bytes) is not tuple:
        _refuse("shape.strides_bytes", strides_bytes, "a tuple of numbers")
    if strides_bytes and len(strides_bytes) != len(dimension_order):
        raise InvalidFieldError(
            f"shape.strides_bytes has {len(strides_bytes)} entries: allowed is none, or one for each of the "
            f"{len(dimension_order)} letters of shape.dimension_order = {dimension_order!r}"
        )
    for stride_bytes in strides_bytes:
        _check_number("shape.strides_bytes", stride_bytes, high=U64_MAX)


def _check_range(first: int, count: int, *, of: int, noun: str) -> None:
    """Check that `count` layers or heads from `first` on are among the model's `of`."""
    if first + count > of:
        raise InvalidFieldError(
            f"part.first_{noun} + part.{noun}s_count = {first} + {count}: allowed is at most {of}, "
            f"the {noun}s of the identity's model"
        )
