"""Where buffers of the caller's lie in this process's memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvservice import native
from kvservice.core.errors import InvalidFieldError


class Located:
    """Contiguous pieces of memory, in order.

    addresses, sizes: of each, in bytes. owners: hold the memory, and for resizable
    exporters the export that pins it. Lists, since a batch is hundreds of these and
    each object would cost more than its piece.
    """

    __slots__ = ("addresses", "is_writable", "owners", "sizes")

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.owners: list[object] = []
        self.is_writable = True

    def add(self, items: Sequence[Any], name: str) -> None:
        """Locate more pieces, without copying; `name` is only for errors.

        Raises:
            InvalidFieldError: one exports no bytes, is not contiguous, is empty, or is
                not in host memory.
        """
        find = native.buffer_address
        for index, item in enumerate(items):
            if type(item) is np.ndarray:
                self.is_writable = self.is_writable and item.flags.writeable
                owner: Any = item
            else:
                owner = self._pin(item, name, index)
                if owner is item:
                    continue  # A tensor, which tells its address itself.
            try:
                address, size_bytes = find(owner, False)
            except BufferError:
                raise _refused(name, index, f"is non-contiguous ({_description(item)})") from None
            if not size_bytes:
                raise _refused(name, index, "is empty")
            self.addresses.append(address)
            self.sizes.append(size_bytes)
            self.owners.append(owner)

    def _pin(self, item: Any, name: str, index: int) -> object:
        """Return a view that pins an exporter's memory, or the item itself if it is a tensor (added here)."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(item, torch.Tensor):
            self._add_tensor(item, name, index)
            return item
        try:
            # While an export is open a bytearray cannot be resized, so the address cannot go
            # stale under a copy.
            view = memoryview(item)
        except TypeError:
            raise _refused(name, index, f"is a {type(item).__name__}, which exports no memory") from None
        self.is_writable = self.is_writable and not view.readonly
        return view

    def _add_tensor(self, tensor: Any, name: str, index: int) -> None:
        if tensor.device.type != "cpu":
            raise _refused(name, index, f"is on {tensor.device}, not in host memory")
        if not tensor.is_contiguous():
            raise _refused(name, index, f"is non-contiguous ({_description(tensor)})")
        size_bytes = tensor.numel() * tensor.element_size()
        if not size_bytes:
            raise _refused(name, index, "is empty")
        self.addresses.append(tensor.data_ptr())
        self.sizes.append(size_bytes)
        self.owners.append(tensor)


def locate_one(item: Any, name: str) -> Located:
    """Return where one buffer lies; see `Located.add`."""
    located = Located()
    located.add((item,), name)
    return located


def _description(item: Any) -> str:
    shape = getattr(item, "shape", None)
    return type(item).__name__ if shape is None else f"{type(item).__name__} of shape {tuple(shape)}"


def _refused(name: str, index: int, what: str) -> InvalidFieldError:
    return InvalidFieldError(
        f"{name}[{index}] {what}; give contiguous host memory (bytes-like, NumPy array or CPU tensor), or "
        "the pieces of each block as a list, or use BlockBuffers.strided for an engine's KV tensors"
    )
