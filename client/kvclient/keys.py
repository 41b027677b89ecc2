"""Block keys as callers have them, into the packed form that travels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import BatchSizeError, InvalidFieldError

KEY_BYTES = 32

Keys = bytes | bytearray | memoryview | Sequence[bytes] | npt.NDArray[np.uint8]
"""Keys of a batch, in order: packed (a multiple of 32 bytes), a sequence of 32-byte
keys, or an array (keys, 32) uint8. Copied where needed; never kept by reference
unless immutable."""


def taken(packed: bytes, indexes: Iterable[int]) -> list[bytes]:
    """Return some of the packed keys."""
    return [packed[index * KEY_BYTES : (index + 1) * KEY_BYTES] for index in indexes]


def packed_keys(keys: Keys) -> bytes:
    """Return the keys one after the other, 32 bytes each.

    Keys that stand twice are found by the server (DuplicateKeyError).

    Raises:
        BatchSizeError: there is no key.
        InvalidFieldError: a key has not 32 bytes, or the type is none of `Keys`.
    """
    if isinstance(keys, bytes):
        packed = keys
    elif isinstance(keys, list | tuple):
        packed = _joined(keys)
    elif isinstance(keys, np.ndarray):
        packed = _packed_array(keys)
    elif isinstance(keys, bytearray | memoryview):
        packed = bytes(keys)
    else:
        raise InvalidFieldError(
            f"keys is a {type(keys).__name__}; give packed bytes, a list of {KEY_BYTES}-byte keys, "
            f"or a (keys, {KEY_BYTES}) uint8 array"
        )
    if not packed:
        raise BatchSizeError("keys is empty; give one key at least")
    if len(packed) % KEY_BYTES:
        raise InvalidFieldError(
            f"keys has {len(packed)} bytes, which is no multiple of {KEY_BYTES}; pack whole keys"
        )
    return packed


def _joined(keys: Sequence[bytes]) -> bytes:
    try:
        packed = b"".join(keys)
        # One pass in C for the common case; the slow search runs only to name the culprit.
        is_sound = set(map(len, keys)) <= {KEY_BYTES}
    except TypeError:
        kinds = [type(key) for key in keys]
        index = next(index for index, kind in enumerate(kinds) if kind not in {bytes, bytearray, memoryview})
        raise InvalidFieldError(
            f"keys[{index}] is a {type(keys[index]).__name__}; give bytes of length {KEY_BYTES}"
        ) from None
    if not is_sound:
        index = next(index for index, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise InvalidFieldError(f"keys[{index}] has {len(keys[index])} bytes; a key has {KEY_BYTES}")
    return packed


def _packed_array(keys: npt.NDArray[np.uint8]) -> bytes:
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:  # noqa: PLR2004 - (keys, 32)
        raise InvalidFieldError(
            f"keys is an array of shape {keys.shape} and dtype {keys.dtype}; give (keys, {KEY_BYTES}) uint8"
        )
    return keys.tobytes()
