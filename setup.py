"""Builds the C extensions; all other settings are in pyproject.toml.

Both are optional. Without a compiler the install goes on, and `kvservice.native` serves
the same functions through NumPy; without UCX's headers `kvservice.native.ucx` says that
it is not available. The headers alone are needed: the library is found at run time.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("kvservice") / "native"
SYSTEM_HEADERS = Path("/usr/include")
SOURCES = (
    "module.c",
    "arguments.c",
    "kernel.c",
    "kernel_avx512.c",
    "kernel_x86.c",
    "kernel_arm.c",
    "pieces.c",
    "rows.c",
    "row_read.c",
    "row_calls.c",
    "slot_copy.c",
)
UCX_SOURCES = (
    "arguments.c",
    "ucx/module.c",
    "ucx/library.c",
    "ucx/log_ring.c",
    "ucx/envelope.c",
    "ucx/failures.c",
    "ucx/turns.c",
    "ucx/worker.c",
    "ucx/endpoint.c",
    "ucx/memory.c",
    "ucx/batch.c",
    "ucx/batch_state.c",
    "ucx/worker_type.c",
    "ucx/endpoint_type.c",
    "ucx/segment_type.c",
    "ucx/registration_type.c",
    "ucx/transfer_call.c",
)


def extension(name: str, sources: Sequence[str], compile_args: list[str]) -> Extension:
    """Describe one extension of kvservice.native."""
    return Extension(
        f"kvservice.native.{name}",
        sources=[str(NATIVE / source) for source in sources],
        depends=[str(path) for path in NATIVE.rglob("*.h")],
        extra_compile_args=["-O3", *compile_args],
        optional=True,
    )


def ucx_headers() -> Path | None:
    """Find the folder that has UCX's headers, or None.

    What the operator names goes first, then the package libucx-cu12 in the environment
    that this interpreter belongs to, then the system's.
    """
    named = os.environ.get("KVSERVICE_UCX_INCLUDE")
    packaged = Path(sysconfig.get_path("purelib")) / "libucx" / "include"
    for folder in ([Path(named)] if named else []) + [packaged, SYSTEM_HEADERS]:
        if (folder / "ucp" / "api" / "ucp.h").is_file():
            return folder
    return None


def extensions() -> Iterator[Extension]:
    """List what can be built here."""
    # Nothing for one processor: kernels are chosen when the module loads.
    yield extension("_native", SOURCES, ["-std=c11", "-fno-strict-aliasing"])
    headers = ucx_headers()
    if headers is not None:
        # UCX's headers are GNU C, and warn where the rest may not. The compiler's own folder
        # must not be named again: its headers would find themselves in place of one another.
        found = [] if headers == SYSTEM_HEADERS else ["-isystem", str(headers)]
        yield extension("ucx._ucx", UCX_SOURCES, ["-std=gnu11", "-D_GNU_SOURCE", *found])


setup(ext_modules=list(extensions()))
