"""A pool says where an engine's blocks lie, whatever its tensors are made of."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from kvclient import BlockPool, InvalidFieldError
from kvservice.core.block_geometry import BlockGeometry
from kvservice.core.engine_memory import MemoryKind


class Storage:
    """What tensors are views of, as torch has it."""

    def __init__(self, address, size_bytes):
        self._address, self._size_bytes = address, size_bytes

    def data_ptr(self):
        return self._address

    def nbytes(self):
        return self._size_bytes


class Tensor:
    """As much of a torch tensor as a pool looks at; nobody could read its memory."""

    def __init__(self, storage, shape, *, offset=0, strides=None, device="cuda", item_bytes=2):
        self._storage, self.shape, self._offset = storage, shape, offset
        natural = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
        self._natural, self._strides = natural, natural if strides is None else list(strides)
        self._item_bytes = item_bytes
        self.device = SimpleNamespace(type=device)

    def data_ptr(self):
        return self._storage.data_ptr() + self._offset

    def element_size(self):
        return self._item_bytes

    def stride(self, axis):
        return self._strides[axis]

    def untyped_storage(self):
        return self._storage

    def __getitem__(self, index):
        return Tensor(self._storage, self.shape[1:], strides=self._strides[1:], device=self.device.type)

    def is_contiguous(self):
        return self._strides == self._natural


def geometry_of(pool):
    """Return segments, offsets, strides and lengths of the pieces."""
    found = pool.geometry
    return [column.tolist() for column in (found.segments, found.offsets, found.strides, found.lengths)]


def address_of(array):
    """Return where an array begins."""
    return array.__array_interface__["data"][0]


def test_an_array_of_blocks_is_one_segment_of_one_piece():
    """The usual pool: whole blocks, one after the other."""
    memory = np.zeros((8, 2, 256), np.float32)
    pool = BlockPool.of([memory])
    assert (pool.blocks_count, pool.block_bytes, pool.kind) == (8, 2048, MemoryKind.HOST)
    assert pool.addresses.tolist() == [address_of(memory)]
    assert pool.geometry.segment_sizes_bytes.tolist() == [memory.nbytes]
    assert geometry_of(pool) == [[0], [0], [2048], [2048]]


def test_views_of_one_array_are_one_segment():
    """K and V of a layer, cut out of one tensor in any order: registered once, as a whole."""
    whole = np.zeros((2, 4, 10, 64), np.uint8)
    pool = BlockPool.of([whole[1, 3], whole[0, 0], whole[0, 1][2:]][:2])
    assert len(pool.addresses) == 1
    assert pool.geometry.segment_sizes_bytes.tolist() == [whole.nbytes]
    assert geometry_of(pool)[:2] == [[0, 0], [7 * 640, 0]]


def test_arrays_of_their_own_are_segments_of_their_own():
    """A tensor for each layer: a piece and a segment for each."""
    layers = [np.zeros((10, 64), np.uint8) for _ in range(3)]
    pool = BlockPool.of(layers)
    assert pool.addresses.tolist() == [address_of(layer) for layer in layers]
    assert geometry_of(pool) == [[0, 1, 2], [0, 0, 0], [64] * 3, [64] * 3]
    assert pool.block_bytes == 192


def test_blocks_may_stand_apart():
    """Padding between blocks, and blocks in every second place, are strides."""
    whole = np.zeros((10, 100), np.uint8)
    assert geometry_of(BlockPool.of([whole[:, 4:36]])) == [[0], [4], [100], [32]]
    assert geometry_of(BlockPool.of([whole[1::2]])) == [[0], [100], [200], [100]]


def test_memory_that_is_laid_out_the_other_way_is_one_segment_too():
    """An array may be of columns, and its views are of one storage all the same."""
    whole = np.zeros((64, 2, 10), np.uint8, order="F").T
    pool = BlockPool.of([whole[:, 0], whole[:, 1]])
    assert len(pool.addresses) == 1
    assert geometry_of(pool) == [[0, 0], [0, 64], [128, 128], [64, 64]]


@pytest.mark.parametrize("cut", [slice(0, 1), slice(3, 4), slice(9, None, -20)])
def test_one_block_has_no_stride(cut):
    """What a tensor of one block says of the distance to the next, which may be negative, is nothing."""
    whole = np.zeros((10, 64), np.uint8)
    only = whole[cut]
    pool = BlockPool.of([only])
    assert (pool.blocks_count, pool.block_bytes) == (1, 64)
    assert pool.piece_addresses(np.array([0])).tolist() == [[address_of(only)]]


def test_tensors_of_one_storage_are_one_segment():
    """Layers of a model in one allocation of a device, as engines make them, are registered once."""
    storage = Storage(0x7000_0000, 1 << 20)
    layers = [Tensor(storage, (16, 8, 64), offset=layer * 16 * 1024) for layer in range(4)]
    pool = BlockPool.of(layers)
    assert (pool.kind, pool.blocks_count, pool.block_bytes) == (MemoryKind.CUDA, 16, 4096)
    assert pool.addresses.tolist() == [0x7000_0000]
    assert pool.geometry.segment_sizes_bytes.tolist() == [1 << 20]
    assert geometry_of(pool) == [[0] * 4, [0, 16384, 32768, 49152], [1024] * 4, [1024] * 4]


def test_tensors_of_two_storages_are_two_segments():
    """And what is cut out of either goes to its own; K and V of a block alternate in one."""
    storages = [Storage(0x7000_0000, 1 << 20), Storage(0x9000_0000, 1 << 16)]
    both = (16, 64)
    pool = BlockPool.of(
        [
            Tensor(storages[1], both, strides=(128, 1), device="cpu"),
            Tensor(storages[0], both, offset=4096, device="cpu"),
            Tensor(storages[1], both, strides=(128, 1), offset=128, device="cpu"),
        ]
    )
    assert (pool.kind, pool.is_writable) == (MemoryKind.HOST, True)
    assert pool.addresses.tolist() == [0x9000_0000, 0x7000_0000]
    assert geometry_of(pool) == [[0, 1, 0], [0, 4096, 128], [256, 128, 256], [128] * 3]


@pytest.mark.parametrize("device", ["xpu", "meta", "npu", "mps"])
def test_memory_of_an_unknown_device_is_refused(device):
    """To take it for memory of the host would be a crash, at the first checksum."""
    tensor = Tensor(Storage(1 << 20, 1 << 20), (4, 64), device=device)
    with pytest.raises(InvalidFieldError, match=r"tensors\[0\] is on .*cpu or cuda"):
        BlockPool.of([tensor])


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([], "tensors is empty"),
        ([np.zeros((4, 64)), np.zeros((5, 64))], "tensors have \\[4, 5\\] blocks"),
        ([np.zeros(())], "tensors\\[0\\] has shape \\(\\)"),
        ([np.zeros((4, 64)), np.zeros((0, 64))], "tensors\\[1\\] has shape \\(0, 64\\)"),
        ([np.zeros((4, 0))], "tensors\\[0\\] has shape \\(4, 0\\)"),
        ([np.zeros((4, 8, 8))[:, :, ::2]], "tensors\\[0\\]: a block of it is not contiguous"),
        ([np.zeros((64, 4)).T], "not contiguous"),
        ([np.zeros((4, 64))[::-1]], "overlap or run backwards"),
        ([np.broadcast_to(np.zeros(64), (4, 64))], "overlap"),
        ([np.lib.stride_tricks.sliding_window_view(np.zeros(100), 64)], "overlap"),
        ([Tensor(Storage(1 << 20, 1 << 20), (4, 8, 8), strides=(64, 1, 8))], "not contiguous"),
        ([Tensor(Storage(1 << 20, 1 << 20), (4, 64), strides=(0, 1))], "overlap"),
        (np.zeros((4, 64)), "tensors is a ndarray"),
        ([np.zeros((4, 64), object)], "tensors\\[0\\] is an array of Python objects"),
        ([b"no array"], "tensors\\[0\\] is a bytes"),
        ([np.zeros((4, 64)), 7], "tensors\\[1\\] is a int"),
        ([np.zeros((4, 64)), Tensor(Storage(1 << 20, 1 << 20), (4, 64))], "one pool for each"),
    ],
)
def test_what_is_no_pool_is_refused(tensors, says):
    """Field and way out are named before anything is registered."""
    with pytest.raises(InvalidFieldError, match=says):
        BlockPool.of(tensors)


def test_pieces_that_share_bytes_are_refused():
    """The same tensor twice would be copied into as it happens to be ordered."""
    memory = np.zeros((4, 64), np.uint8)
    with pytest.raises(InvalidFieldError, match="geometry"):
        BlockPool.of([memory, memory])


def test_read_only_memory_can_be_lent_and_not_received_into():
    """A pool knows; one read-only tensor among others is enough."""
    frozen, memory = np.zeros((4, 64), np.uint8), np.zeros((4, 64), np.uint8)
    frozen.flags.writeable = False
    assert BlockPool.of([memory]).is_writable
    assert not BlockPool.of([memory, frozen]).is_writable


def test_pieces_are_those_of_the_blocks_in_their_order():
    """Block after block, and in it piece after piece."""
    layers = [np.zeros((10, 64), np.uint8), np.zeros((10, 16), np.uint8)]
    pieces = BlockPool.of(layers).pieces(np.array([7, 0, 7]))
    first, second = (address_of(layer) for layer in layers)
    assert pieces.addresses.tolist() == [
        *(first + 7 * 64, second + 7 * 16),
        *(first, second),
        *(first + 7 * 64, second + 7 * 16),
    ]
    assert pieces.lengths.tolist() == [64, 16] * 3
    assert pieces.counts.tolist() == [2, 2, 2]
    assert BlockPool.of(layers[:1]).pieces(np.array([1])).counts is None
    assert len(BlockPool.of(layers).pieces(np.empty(0, np.int64)).addresses) == 0


@pytest.mark.parametrize("block", [-1, 10, 2**40])
def test_a_block_that_the_pool_does_not_have_is_refused(block):
    """An address of somebody else's is never made."""
    pool = BlockPool.of([np.zeros((10, 64), np.uint8)])
    with pytest.raises(InvalidFieldError, match=r"blocks goes from .* the pool has blocks 0 to 9"):
        pool.pieces(np.array([3, block]))


def test_raw_addresses_are_one_for_each_segment():
    """Who describes the memory by hand gives as many as the geometry has."""
    geometry = BlockGeometry(
        segment_sizes_bytes=np.array([4096, 4096], np.uint64),
        segments=np.array([1], np.uint32),
        offsets=np.array([0], np.uint64),
        strides=np.array([64], np.uint64),
        lengths=np.array([64], np.uint64),
        blocks_count=4,
    )
    with pytest.raises(InvalidFieldError, match="addresses has shape"):
        BlockPool([4096], geometry, MemoryKind.HOST, None)
    pool = BlockPool([4096, 1 << 30], geometry, MemoryKind.CUDA, None)
    assert pool.piece_addresses(np.array([2])).tolist() == [[(1 << 30) + 128]]


def test_a_pool_keeps_its_memory_alive():
    """Whoever holds the pool need not hold the tensors too."""
    memory = np.zeros((4, 64), np.uint8)
    seen, pool = weakref.ref(memory), BlockPool.of([memory])
    del memory
    gc.collect()
    assert seen() is not None
    del pool
    gc.collect()
    assert seen() is None
