"""Keys in every form that callers have them in."""

import numpy as np
import pytest

from kvclient import BatchSizeError, InvalidFieldError, packed_keys

ONE, TWO = bytes(range(32)), bytes(range(32, 64))


@pytest.mark.parametrize(
    "keys",
    [
        ONE + TWO,
        bytearray(ONE + TWO),
        memoryview(ONE + TWO),
        [ONE, TWO],
        (ONE, TWO),
        [ONE, bytearray(TWO)],
        np.frombuffer(ONE + TWO, np.uint8).reshape(2, 32),
        np.frombuffer((ONE + TWO) * 2, np.uint8).reshape(4, 32)[:2],
        np.asfortranarray(np.frombuffer(ONE + TWO, np.uint8).reshape(2, 32)),
    ],
)
def test_every_form_packs_to_the_same_bytes(keys):
    """Key after key, 32 bytes each."""
    assert packed_keys(keys) == ONE + TWO


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        (b"", BatchSizeError, "one key at least"),
        ([], BatchSizeError, "one key at least"),
        (np.empty((0, 32), np.uint8), BatchSizeError, "one key at least"),
        (ONE + b"x", InvalidFieldError, "33 bytes"),
        ([ONE, ONE[:31], TWO + b"x"], InvalidFieldError, r"keys\[1\] has 31 bytes"),
        ([ONE, "text"], InvalidFieldError, r"keys\[1\] is a str"),
        ([ONE, 7], InvalidFieldError, r"keys\[1\] is a int"),
        (np.zeros((2, 16), np.uint8), InvalidFieldError, r"shape \(2, 16\)"),
        (np.zeros((2, 32), np.int64), InvalidFieldError, "int64"),
        ("text", InvalidFieldError, "keys is a str"),
        ({ONE}, InvalidFieldError, "keys is a set"),
    ],
)
def test_what_is_no_key_is_named(keys, error, words):
    """The error names the key, what it is, and what to give."""
    with pytest.raises(error, match=words):
        packed_keys(keys)
