import mmap

import google_crc32c
import numpy as np
import pytest

from kvservice import native
from kvservice.native import fallback

SIZES = [0, 1, 7, 8, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 12288, 16383, 16384, 16385, 70001]
NEVER = 2**63
ALWAYS = 0


def random_bytes(size, seed=0):
    """Give bytes without a pattern, the same in every run."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def u64(*values):
    """Give an array of addresses or lengths."""
    return np.array(values, dtype=np.uint64)


def u32(*values):
    """Give an array of counts or checksums."""
    return np.array(values, dtype=np.uint32)


@pytest.mark.parametrize(
    ("text", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_vectors(bulk, text, checksum):
    """The checksum is CRC-32C as RFC 3720 has it, so stored blocks can be read by other programs."""
    assert bulk.crc32c(text) == checksum


@pytest.mark.parametrize("size", SIZES)
def test_the_checksum_equals_another_library_at_every_alignment(bulk, size):
    """Short ends, stripes and folding join to the one value, wherever the bytes lie."""
    store = random_bytes(size + 64)
    for offset in (0, 1, 31, 63):
        view = store[offset : offset + size]
        expected = google_crc32c.value(view.tobytes())
        assert bulk.crc32c(view) == expected
        half = size // 3
        assert bulk.crc32c(view[half:], bulk.crc32c(view[:half])) == expected


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint16)])
def test_the_checksum_takes_any_contiguous_buffer(bulk, make):
    """Callers hold bytes in many types; none has to be converted first."""
    assert bulk.crc32c(make(b"12345678")) == google_crc32c.value(b"12345678")


@pytest.mark.parametrize("threshold", [ALWAYS, NEVER])
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_writes_the_piece_and_nothing_else(bulk, size, threshold):
    """Each kind of copy, at each alignment, with and without checksum, leaves the neighbours alone."""
    source = random_bytes(size + 64)
    for source_offset, target_offset in ((0, 0), (1, 0), (0, 1), (5, 60), (63, 8)):
        for is_summed in (False, True):
            target = np.full(size + 192, 0xA5, dtype=np.uint8)
            checksums = u32(7) if is_summed else None
            start = 64 + target_offset
            bulk.copy_blocks(
                u64(target.ctypes.data + start),
                u64(source.ctypes.data + source_offset),
                u64(size),
                None,
                checksums,
                threshold,
            )
            piece = source[source_offset : source_offset + size]
            expected = np.full_like(target, 0xA5)
            expected[start : start + size] = piece
            assert np.array_equal(target, expected)
            if is_summed:
                assert checksums[0] == google_crc32c.value(piece.tobytes())


@pytest.mark.parametrize("threshold", [ALWAYS, 1000, NEVER])
def test_blocks_are_gathered_from_many_pieces(bulk, threshold):
    """A block's checksum is that of its pieces one after another; empty pieces and blocks are allowed."""
    lengths = u64(*SIZES, 0, 3, *reversed(SIZES))
    counts = u32(0, 3, 1, len(lengths) - 5, 0, 1)
    store = random_bytes(int(lengths.sum()) + 17 * len(lengths))
    offsets = np.cumsum(lengths + np.uint64(17)) - lengths - np.uint64(17)
    order = np.random.default_rng(1).permutation(len(lengths))
    sources = np.uint64(store.ctypes.data) + offsets
    target = np.zeros(int(lengths.sum()), dtype=np.uint8)
    places = np.zeros(len(lengths), dtype=np.uint64)
    places[order] = np.cumsum(lengths[order]) - lengths[order]
    checksums = np.zeros(len(counts), dtype=np.uint32)

    bulk.copy_blocks(places + np.uint64(target.ctypes.data), sources, lengths, counts, checksums, threshold)

    pieces = [store[int(o) : int(o + n)].tobytes() for o, n in zip(offsets, lengths, strict=True)]
    for piece, place in zip(pieces, places, strict=True):
        assert target[int(place) : int(place) + len(piece)].tobytes() == piece
    ends = np.cumsum(counts)
    expected = [
        google_crc32c.value(b"".join(pieces[end - count : end]))
        for end, count in zip(ends, counts, strict=True)
    ]
    assert checksums.tolist() == expected
    again = np.zeros_like(checksums)
    bulk.checksum_blocks(sources, lengths, counts, again)
    assert again.tolist() == expected


def test_without_piece_counts_each_piece_is_a_block(bulk):
    """The common case of whole blocks needs no array of ones."""
    source = random_bytes(300)
    target = np.zeros(300, dtype=np.uint8)
    starts = u64(0, 100, 200)
    checksums = u32(0, 0, 0)
    bulk.copy_blocks(
        starts + np.uint64(target.ctypes.data),
        starts + np.uint64(source.ctypes.data),
        u64(100, 100, 100),
        None,
        checksums,
    )
    assert checksums.tolist() == [google_crc32c.value(source[i : i + 100].tobytes()) for i in (0, 100, 200)]
    bulk.copy_blocks(u64(), u64(), u64(), None, u32())


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"targets": u64(1, 2)}, "targets"),
        ({"sources": u64()}, "sources"),
        ({"sources": u32(1)}, "sources"),
        ({"lengths": np.array([1], dtype=np.int64)}, "lengths"),
        ({"lengths": np.zeros((1, 1), dtype=np.uint64)}, "lengths"),
        ({"lengths": np.zeros(4, dtype=np.uint64)[::2]}, "lengths"),
        ({"lengths": np.zeros(9, dtype=np.uint8)[1:].view(np.uint64)}, "lengths"),
        ({"piece_counts": u32(2)}, "piece_counts"),
        ({"piece_counts": u64(1)}, "piece_counts"),
        ({"checksums": u32(1, 2)}, "checksums"),
        ({"checksums": np.frombuffer(bytes(4), dtype=np.uint32)}, "checksums"),
        ({"streaming_threshold_bytes": -1}, "streaming_threshold_bytes"),
    ],
)
def test_a_wrong_array_is_refused_by_name(bulk, changed, name):
    """Addresses go straight to memory, so whatever does not fit is refused before anything moves."""
    arguments = {
        "targets": u64(0),
        "sources": u64(0),
        "lengths": u64(0),
        "piece_counts": None,
        "checksums": u32(0),
    }
    with pytest.raises(ValueError, match=name):
        bulk.copy_blocks(**(arguments | changed))


def test_arguments_are_bound_as_python_binds_them(bulk):
    """The C functions take names, and refuse missing, doubled and unknown ones, as the stub promises."""
    assert bulk.crc32c(buffer=b"123456789", value=0) == 0xE3069283
    for bad in (bulk.crc32c, lambda: bulk.crc32c(b"", 0, 0), lambda: bulk.crc32c(b"", x=1)):
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(TypeError):
        bulk.crc32c(b"", buffer=b"")
    with pytest.raises(TypeError):
        bulk.crc32c("text")
    with pytest.raises(ValueError, match="value"):
        bulk.crc32c(b"", 2**32)


def test_the_address_of_a_buffer_is_where_its_bytes_lie(bulk):
    """Pool registration turns an engine's buffer into numbers without a copy."""
    array = np.zeros((4, 5), dtype=np.uint32)
    assert bulk.buffer_address(array, writable=True) == (array.ctypes.data, 80)
    with mmap.mmap(-1, 8192) as mapped:
        address, size = bulk.buffer_address(mapped, writable=True)
        assert size == 8192
        assert address % mmap.PAGESIZE == 0
    assert bulk.buffer_address(b"abc", writable=False)[1] == 3


def test_a_buffer_that_cannot_be_addressed_is_refused(bulk):
    """Strided, read-only or foreign objects say so; they are never copied behind the caller's back."""
    with pytest.raises(BufferError, match="contiguous"):
        bulk.buffer_address(np.zeros((4, 4))[:, 1], writable=False)
    with pytest.raises(BufferError, match="contiguous"):
        bulk.buffer_address(np.asfortranarray(np.zeros((4, 4))), writable=False)
    with pytest.raises(BufferError, match="read-only"):
        bulk.buffer_address(b"abc", writable=True)
    with pytest.raises(TypeError, match="buffer protocol"):
        bulk.buffer_address(12, writable=False)


def test_the_package_exposes_one_implementation_whole(bulk):
    """Whichever is chosen has every name and the same threshold, and says whether and why."""
    for name in native.__all__:
        assert hasattr(native, name)
    assert (native.why_not_native() == "") == native.IS_NATIVE
    assert bulk.STREAMING_THRESHOLD_BYTES == fallback.STREAMING_THRESHOLD_BYTES
    assert (
        native.copy_blocks.__module__ == f"kvservice.native.{'_native' if native.IS_NATIVE else 'fallback'}"
    )
