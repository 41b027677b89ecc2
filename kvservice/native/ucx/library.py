"""Which UCX library this process uses.

UCX is never linked and never bundled: it is found when it is wanted. Two of its builds
matter. The package `libucx-cu12` has shared memory, CMA, TCP and CUDA, and no InfiniBand
or RoCE; an operator who has those installs UCX with the system. `auto` takes the package
where it is installed, since that is a decision somebody made for this environment, and
the system's otherwise.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvservice.native.ucx.failures import UcxUnavailableError

SONAME = "libucp.so.0"
"""What the dynamic loader calls the library, whichever version of UCX 1 it is."""

_PACKAGE = "libucx"


def find_library(choice: str = "auto") -> str:
    """Turn a choice into what `load` takes: a path, or the name that the loader looks up itself.

    `choice` is "wheel", "system", "auto", or the absolute path of a libucp. The system's
    library is looked for by the loader, so whether there is one shows when it is loaded.

    Raises:
        UcxUnavailableError: there is no such file, or the package is not installed.
    """
    if choice == "system":
        return SONAME
    if choice in {"wheel", "auto"}:
        packaged = _packaged_library()
        if packaged is not None:
            return str(packaged)
        if choice == "auto":
            return SONAME
        raise UcxUnavailableError(
            "the package libucx-cu12 is not installed here: install kvservice with the extra `ucx`, "
            "or choose the library `system`"
        )
    path = Path(choice)
    if not path.is_absolute():
        raise UcxUnavailableError(
            f"the UCX library {choice!r} is none of auto, wheel, system, or an absolute path"
        )
    if not path.is_file():
        raise UcxUnavailableError(f"the UCX library {choice} does not exist: name the file libucp.so.0")
    return str(path)


def _packaged_library() -> Path | None:
    """Find the library of the package without importing it, since importing may load it."""
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        library = Path(folder) / "lib" / SONAME
        if library.is_file():
            return library
    return None
