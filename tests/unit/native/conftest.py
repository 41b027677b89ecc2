"""The implementations under test: the fallback, and the C extension with each of its kernels."""

import importlib

import pytest

from kvservice.native import fallback

try:
    from kvservice.native import _native
except ImportError:
    _native = None

KERNELS = () if _native is None else _native.kernel_names()
IMPLEMENTATIONS = ("fallback", "native")


@pytest.fixture(params=("fallback", *(f"native-{name}" for name in KERNELS)))
def bulk(request):
    """Give a module with the functions, for each kernel that this processor can run."""
    name, _, kernel = request.param.partition("-")
    if name == "fallback":
        yield fallback
        return
    _native.use_kernel(kernel)
    yield _native
    _native.use_kernel(KERNELS[0])


@pytest.fixture(params=IMPLEMENTATIONS)
def operations(request):
    """Give a module with the functions; the kernel makes no difference to rows."""
    return implementation(request.param)


def implementation(name):
    """Import one of the two implementations, or skip the test where it was not built."""
    if name == "native" and _native is None:
        pytest.skip("the C extension was not built")
    return importlib.import_module(f"kvservice.native.{'_native' if name == 'native' else name}")
