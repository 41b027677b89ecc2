"""Where one buffer of the caller's lies in this process's memory."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from kvservice import native
from kvservice.core.errors import InvalidFieldError


class Located(NamedTuple):
    """One contiguous piece of memory. A tuple, since hundreds are made in one call.

    owner: holds the memory, and for resizable exporters the export that pins it.
    """

    owner: object
    address: int
    size_bytes: int
    is_writable: bool


def locate(item: Any, name: str, index: int | None) -> Located:
    """Return where `item` lies, without copying.

    `name` and `index` only name it in errors.

    Raises:
        InvalidFieldError: it exports no bytes, is not contiguous, is empty, or is
            not in host memory.
    """
    if isinstance(item, np.ndarray):
        if not item.flags.c_contiguous:
            raise _refused(name, index, f"is a non-contiguous array of shape {item.shape}")
        address, size_bytes = native.buffer_address(item, False)
        found = Located(item, address, size_bytes, bool(item.flags.writeable))
    else:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(item, torch.Tensor):
            found = _locate_tensor(item, name, index)
        else:
            found = _locate_exporter(item, name, index)
    if not found.size_bytes:
        raise _refused(name, index, "is empty")
    return found


def _locate_tensor(tensor: Any, name: str, index: int | None) -> Located:
    if tensor.device.type != "cpu":
        raise _refused(name, index, f"is on {tensor.device}, not in host memory")
    if not tensor.is_contiguous():
        raise _refused(name, index, f"is a non-contiguous tensor of shape {tuple(tensor.shape)}")
    return Located(tensor, tensor.data_ptr(), tensor.numel() * tensor.element_size(), True)


def _locate_exporter(item: Any, name: str, index: int | None) -> Located:
    try:
        # The view stays in `owner`: while an export is open a bytearray cannot be resized, so the
        # address cannot go stale under a copy.
        view = memoryview(item)
    except TypeError:
        raise _refused(name, index, f"is a {type(item).__name__}, which exports no memory") from None
    if not view.c_contiguous:
        raise _refused(name, index, "is a non-contiguous view")
    address, size_bytes = native.buffer_address(view, False)
    return Located(view, address, size_bytes, not view.readonly)


def _refused(name: str, index: int | None, what: str) -> InvalidFieldError:
    where = name if index is None else f"{name}[{index}]"
    return InvalidFieldError(
        f"{where} {what}; give contiguous host memory (bytes-like, NumPy array or CPU tensor), or the pieces "
        "of each block as a list, or use BlockBuffers.strided for an engine's KV tensors"
    )
