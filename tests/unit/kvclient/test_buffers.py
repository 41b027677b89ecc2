"""The caller's memory: every form gives the same addresses, and what is unfit is named."""

import ctypes
import sys
import types

import numpy as np
import pytest

from kvclient import BatchSizeError, BlockBuffers, BlockSizeError, InvalidFieldError


def content(buffers):
    """Read what the pieces of each block say, block by block."""
    pieces = buffers.pieces
    counts = [1] * buffers.blocks_count if pieces.counts is None else pieces.counts.tolist()
    places = iter(zip(pieces.addresses.tolist(), pieces.lengths.tolist(), strict=True))
    return [b"".join(ctypes.string_at(*next(places)) for _ in range(count)) for count in counts]


def test_a_list_of_any_buffers_is_one_block_each():
    """A bytes-like object, a view and an array are all a block by themselves."""
    blocks = [b"abcd", bytearray(b"efgh"), memoryview(b"ijkl"), np.frombuffer(b"mnop", np.uint8)]
    buffers = BlockBuffers.of(blocks)
    assert content(buffers) == [b"abcd", b"efgh", b"ijkl", b"mnop"]
    assert (buffers.uniform_bytes, buffers.size_bytes) == (4, 16)


def test_one_buffer_is_cut_by_the_parts():
    """A contiguous buffer holds the blocks key-major, part after part."""
    buffers = BlockBuffers.of(b"aabbbccddd", [2, 3])
    assert content(buffers) == [b"aa", b"bbb", b"cc", b"ddd"]
    assert buffers.lengths.tolist() == [2, 3, 2, 3]


def test_pieces_follow_one_another_in_their_block():
    """A list of lists gives each block's pieces in order."""
    buffers = BlockBuffers.of([[b"ab", b"cd"], [b"efgh"], [b"i", b"j", b"kl"]])
    assert content(buffers) == [b"abcd", b"efgh", b"ijkl"]


def test_strided_tensors_give_the_same_bytes_as_slices(rng):
    """Piece j of a block is its slice of tensor j, whatever the stride of the first dimension."""
    pool = np.frombuffer(rng.randbytes(2 * 10 * 64), np.uint8).reshape(2, 10, 64)
    every_other = pool[1][::2]
    ids = [3, 0, 4]
    buffers = BlockBuffers.strided([pool[0], every_other], ids)
    assert content(buffers) == [pool[0][i].tobytes() + every_other[i].tobytes() for i in ids]
    backwards = pool[0][::-1]
    assert content(BlockBuffers.strided([backwards], ids)) == [backwards[i].tobytes() for i in ids]


def test_torch_tensors_are_taken_where_torch_is_loaded(monkeypatch):
    """Torch is looked up, never imported; a CPU tensor is as good as an array, another device is not."""

    class Tensor:
        def __init__(self, array, device="cpu"):
            self.array, self.device = array, types.SimpleNamespace(type=device)
            self.shape = array.shape

        is_contiguous = property(lambda self: lambda: self.array.flags.c_contiguous)
        data_ptr = property(lambda self: lambda: self.array.ctypes.data)
        numel = property(lambda self: lambda: self.array.size)
        element_size = property(lambda self: lambda: self.array.itemsize)
        dim = property(lambda self: lambda: self.array.ndim)

        def __len__(self):
            return len(self.array)

        def __getitem__(self, index):
            return Tensor(self.array[index], self.device.type)

        def stride(self, dimension):
            return self.array.strides[dimension] // self.array.itemsize

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    array = np.arange(24, dtype=np.uint16).reshape(4, 6)
    assert content(BlockBuffers.of([Tensor(array[0]), Tensor(array[2])])) == [
        array[0].tobytes(),
        array[2].tobytes(),
    ]
    assert content(BlockBuffers.strided([Tensor(array)], [3, 1])) == [array[3].tobytes(), array[1].tobytes()]
    with pytest.raises(InvalidFieldError, match=r"blocks\[0\].*host memory"):
        BlockBuffers.of([Tensor(array, "cuda")])
    with pytest.raises(InvalidFieldError, match=r"tensors\[0\].*host memory"):
        BlockBuffers.strided([Tensor(array, "cuda")], [0])
    with pytest.raises(InvalidFieldError, match="non-contiguous"):
        BlockBuffers.of([Tensor(array[:, ::2])])


@pytest.mark.parametrize("counts", [None, [2, 1, 3, 2]])
def test_taking_blocks_takes_all_their_pieces(counts):
    """A subset of blocks in any order carries each block's own pieces."""
    memory = np.arange(8, dtype=np.uint8)
    addresses = memory.ctypes.data + np.arange(8, dtype=np.uint64)
    buffers = BlockBuffers.from_addresses(addresses, np.ones(8), counts, owner=memory)
    whole = content(buffers)
    taken = buffers.take(np.array([2, 0]))
    assert content(taken) == [whole[2], whole[0]]
    assert content(buffers.first(2)) == whole[:2]
    assert buffers.first(len(whole)) is buffers


def test_a_resizable_buffer_cannot_move_while_it_is_held():
    """The export stays open, so a bytearray refuses to be resized under a copy."""
    block = bytearray(16)
    buffers = BlockBuffers.of([block])
    with pytest.raises(BufferError):
        block.extend(b"more")
    del buffers
    block.extend(b"more")


@pytest.mark.parametrize(
    ("blocks", "error", "words"),
    [
        ([], BatchSizeError, "blocks is empty"),
        ([b""], InvalidFieldError, r"blocks\[0\] is empty"),
        ([b"ab", 5], InvalidFieldError, r"blocks\[1\] is a int"),
        ([np.zeros((4, 4))[:, 0]], InvalidFieldError, r"blocks\[0\] is non-contiguous \(ndarray of shape"),
        ([memoryview(b"abcdef")[::2]], InvalidFieldError, "is non-contiguous"),
        ([[b"ab"], []], InvalidFieldError, r"blocks\[1\] is no list of pieces"),
        ([[b"ab"], b"cd"], InvalidFieldError, r"blocks\[1\] is no list of pieces"),
        (b"abc", BlockSizeError, "one buffer of 3 bytes"),
        (7, InvalidFieldError, "is a int"),
    ],
)
def test_what_is_unfit_is_named(blocks, error, words):
    """The error names the index, what is there, and the way out."""
    with pytest.raises(error, match=words):
        BlockBuffers.of(blocks, [2])


def test_strided_names_bad_tensors_and_ids():
    """An id out of range and a tensor without contiguous blocks are told apart."""
    pool = np.zeros((4, 8), np.uint8)
    with pytest.raises(InvalidFieldError, match=r"from 0 to 4, but tensors\[0\] has blocks 0 to 3"):
        BlockBuffers.strided([pool], [0, 4])
    with pytest.raises(InvalidFieldError, match="from -1"):
        BlockBuffers.strided([pool], [-1])
    with pytest.raises(InvalidFieldError, match="no contiguous blocks"):
        BlockBuffers.strided([pool[:, ::2]], [0])
    with pytest.raises(InvalidFieldError, match="tensors"):
        BlockBuffers.strided([[1]], [0])
    with pytest.raises(BatchSizeError):
        BlockBuffers.strided([pool], [])


def test_addresses_must_agree_with_lengths_and_counts():
    """Raw addresses are believed, their numbers are not."""
    with pytest.raises(InvalidFieldError, match="one length for each address"):
        BlockBuffers.from_addresses([1, 2], [8])
    with pytest.raises(InvalidFieldError, match="add up to 3"):
        BlockBuffers.from_addresses([1, 2], [8, 8], [3])
    with pytest.raises(BatchSizeError):
        BlockBuffers.from_addresses([], [])


def test_the_check_names_count_size_and_write_protection():
    """Blocks are held to the number of keys and to the size of their part; a target must be writable."""
    buffers = BlockBuffers.of([b"aa", b"bbb", b"cc", b"dd"])
    with pytest.raises(InvalidFieldError, match="4 blocks for 3 keys of 2 parts; give 6"):
        buffers.check((2, 3), keys_count=3, is_target=False)
    with pytest.raises(BlockSizeError, match=r"blocks\[3\] has 2 bytes, but part 1 .* 3 bytes"):
        buffers.check((2, 3), keys_count=2, is_target=False)
    with pytest.raises(InvalidFieldError, match="read-only"):
        BlockBuffers.of([b"aa"]).check((2,), keys_count=1, is_target=True)
    BlockBuffers.of([bytearray(2)]).check((2,), keys_count=1, is_target=True)
