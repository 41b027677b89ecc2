"""Namespaces, which keep keys apart, and spaces, the handles that batches name.

A space is (namespace, part, shape). It is interned once, so that a batch of a thousand
keys carries a number and not three digests.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass

from kvservice.core import canonical
from kvservice.core.canonical import DIGEST_BYTES, U32_MAX, Family, Field
from kvservice.core.errors import (
    BlockSizeError,
    InvalidFieldError,
    LimitReachedError,
    SpaceNotOpenError,
    invariant,
)
from kvservice.core.representation import Part
from kvservice.core.slots import GRANULE_BYTES

MAX_SALT_BYTES = 256
MIN_SERVER_KEY_BYTES = 16

MAX_SPACES = 65536
"""Spaces at once. A tensor-parallel group of 8 opens 8 for each model and salt, so this
is for thousands of salts; at about 1 KiB each it costs 64 MiB."""

RETRY_AFTER_MS = 1000
"""Hint when no space is free: they come back when sessions end, which is no matter of milliseconds."""


def namespace_id(tenant: str, *, identity_digest: bytes, salt: bytes, server_key: bytes) -> bytes:
    """Derive the 32-byte namespace of a tenant, an identity and a salt.

    An HMAC, so that a client that knows another tenant's name, model and salt still
    cannot compute the name of that tenant's namespace.

    Raises InvalidFieldError for a salt longer than 256 bytes.
    """
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidFieldError(
            f"salt of {len(salt)} bytes: allowed is 0..{MAX_SALT_BYTES}; send a digest of it"
        )
    invariant(tenant != "", "a namespace needs a tenant")
    invariant(len(identity_digest) == DIGEST_BYTES, f"identity digest of {len(identity_digest)} bytes")
    invariant(len(server_key) >= MIN_SERVER_KEY_BYTES, f"server key of {len(server_key)} bytes")
    encoding = canonical.encode(
        Family.NAMESPACE, (Field(1, tenant), Field(2, identity_digest), Field(3, salt))
    )
    return hmac.digest(server_key, encoding, "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceKey:
    """What makes a space: everything of an index key but the block key."""

    namespace_id: bytes
    part_key: bytes
    shape_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """An open space. `slot_bytes` is `block_bytes` rounded up to whole granules."""

    id: int
    key: SpaceKey
    tenant: str
    part: Part
    block_bytes: int
    slot_bytes: int

    @property
    def namespace_id(self) -> bytes:
        """Return the namespace that the space is in."""
        return self.key.namespace_id


class Spaces:
    """Interns spaces: the same key has the same id for as long as it is open.

    Ids count from 1 and are never reused, so a stale one finds nothing, never another
    tenant's blocks. Every operation is O(1), but for iteration.
    """

    def __init__(self, max_spaces: int = MAX_SPACES) -> None:
        self._max_spaces = max_spaces
        self._last_id = 0
        self._by_key: dict[SpaceKey, Space] = {}
        self._by_id: dict[int, Space] = {}

    def __len__(self) -> int:
        """Return the number of open spaces."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Space]:
        """Yield the open spaces, oldest first."""
        return iter(self._by_id.values())

    def open(self, namespace_id: bytes, *, tenant: str, part: Part) -> Space:
        """Return the space of (namespace, part, shape), and make it where there is none.

        Idempotent. The part has passed `check_part`.

        Raises:
            BlockSizeError: it is open with another block size.
            LimitReachedError: it is new and there are as many as there may be.

        """
        key = SpaceKey(namespace_id=namespace_id, part_key=part.key(), shape_digest=part.shape.digest())
        space = self._by_key.get(key)
        if space is None:
            return self._make(key, tenant=tenant, part=part)
        invariant(space.tenant == tenant, f"namespace {namespace_id.hex()} has two tenants")
        if space.block_bytes != part.block_bytes:
            raise BlockSizeError(
                f"part.block_bytes = {part.block_bytes}: space {space.id} of this part and shape is "
                f"open with {space.block_bytes}; declare that, or a shape that tells the two layouts apart"
            )
        return space

    def get(self, space_id: int) -> Space:
        """Return an open space; raises SpaceNotOpenError if there is none of that id."""
        space = self._by_id.get(space_id)
        if space is None:
            raise SpaceNotOpenError(f"space {space_id} is not open: call OpenNamespace in this session")
        return space

    def discard(self, space_id: int) -> bool:
        """Forget a space that has no block and no session left; False if it was forgotten before."""
        space = self._by_id.pop(space_id, None)
        if space is None:
            return False
        del self._by_key[space.key]
        return True

    def _make(self, key: SpaceKey, *, tenant: str, part: Part) -> Space:
        if len(self._by_id) >= self._max_spaces:
            raise LimitReachedError(
                f"{len(self._by_id)} spaces are open, as many as there may be: use fewer salts or models, "
                "or wait until sessions end",
                retry_after_ms=RETRY_AFTER_MS,
            )
        invariant(self._last_id < U32_MAX, "every space id of this life of the daemon is used")
        self._last_id += 1
        slot_bytes = -(-part.block_bytes // GRANULE_BYTES) * GRANULE_BYTES
        space = Space(
            id=self._last_id,
            key=key,
            tenant=tenant,
            part=part,
            block_bytes=part.block_bytes,
            slot_bytes=slot_bytes,
        )
        self._by_key[key] = space
        self._by_id[space.id] = space
        return space
