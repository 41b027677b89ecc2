"""Builds the C extension; all other settings are in pyproject.toml.

The extension is optional: without a compiler the install goes on, and
`kvservice.native` serves the same functions through NumPy.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("kvservice") / "native"
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

setup(
    ext_modules=[
        Extension(
            "kvservice.native._native",
            sources=[str(NATIVE / name) for name in SOURCES],
            depends=[str(path) for path in NATIVE.glob("*.h")],
            # Nothing for one processor: kernels are chosen when the module loads.
            extra_compile_args=["-O3", "-std=c11", "-fno-strict-aliasing"],
            optional=True,
        )
    ],
)
