"""Sizes and addresses as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.daemon import units

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        (" 256 MiB ", 256 * MIB),
        ("1TiB", 2**40),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_a_size_is_bytes_or_has_a_unit(text, size_bytes):
    """Plain numbers are bytes, and units are powers of 1024."""
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "-1",
        "+1",
        "1.5GiB",
        "1e3",
        "1 000",
        "1gib",
        "1G",
        "1KB",
        "٣",
        str(2**63),
        "8388608TiB",
        "9" * 20,
    ],
)
def test_a_size_that_could_mean_two_things_is_refused(text):
    """Neither decimal units nor fractions nor signs, and nothing that overflows a signed 64-bit number."""
    with pytest.raises(ValueError):
        units.parse_size(text)


@given(st.integers(0, 2**63 - 1), st.sampled_from([1, KIB, MIB, GIB, 2**40]))
def test_a_formatted_size_is_read_back(number, unit):
    """What a message shows can be written into the file."""
    size_bytes = number // unit * unit
    assert units.parse_size(units.format_size(size_bytes)) == size_bytes


def test_an_address_is_host_and_port():
    """What was checked is taken apart in the same place; brackets are of the text, not of the host."""
    assert units.parse_address("[::1]:7400") == units.Address("::1", 7400)
    assert units.parse_address("localhost:0") == units.Address("localhost", 0)
