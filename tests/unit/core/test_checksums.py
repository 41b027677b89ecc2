import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.checksums import NO_CHECKSUM, as_stored, differing

SUMS = st.integers(0, 2**32 - 1)


@given(st.lists(SUMS, max_size=20))
def test_a_stored_checksum_is_never_none(sums):
    """0 says that there is none, so no block that has one is stored with it."""
    stored = as_stored(np.array(sums, dtype=np.uint32))
    assert NO_CHECKSUM not in stored.tolist()
    assert not len(differing(np.array(sums, dtype=np.uint32), stored))


@given(SUMS, SUMS)
def test_another_checksum_differs_unless_none_was_stored(computed, stored):
    """Only zero and all ones are taken for each other."""
    one, other = (np.array([value], dtype=np.uint32) for value in (computed, stored))
    is_same = stored == NO_CHECKSUM or (computed or 2**32 - 1) == stored
    assert differing(one, other).tolist() == ([] if is_same else [0])
