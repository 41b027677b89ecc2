"""Which transport an address gives, and which one is chosen."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvservice.core.errors import InvalidFieldError
from kvservice.transports import registry as registry_module
from kvservice.transports.registry import TransportContext, builtin_registry
from kvservice.transports.shm import SegmentMap
from tests.contract.transport_fakes import FakeOwner


@pytest.fixture
def context():
    """A process that can map memory and owns some."""
    owner = FakeOwner(segment_bytes=4096)
    yield TransportContext(lambda: b"token", SegmentMap(), owner)
    owner.close()


def make_fake(address, context):
    """A factory from elsewhere."""
    return (address, context)


def test_the_scheme_names_the_transport(context):
    """Each built-in scheme gives the transport that declares its name."""
    registry = builtin_registry()
    for address in ("shm:", "tcp://127.0.0.1:1", "inproc:"):
        transport = registry.make(address, context)
        assert transport.capabilities.name == address.partition(":")[0]
        transport.close()


@pytest.mark.parametrize(
    "address",
    ["", "shm", "smoke:signals", "tcp://nowhere", "tcp://host:99999", "shm:here", "inproc:there"],
)
def test_an_address_that_names_no_transport_is_refused(context, address):
    """A wrong address says what is wrong, and is never guessed."""
    with pytest.raises(InvalidFieldError):
        builtin_registry().make(address, context)


@pytest.mark.parametrize("address", ["shm:", "inproc:"])
def test_a_transport_says_what_it_lacks(address):
    """A transport that needs memory or an authority is not made without."""
    with pytest.raises(InvalidFieldError):
        builtin_registry().make(address, TransportContext(lambda: b""))


def test_other_packages_offer_transports_as_entry_points(context, monkeypatch):
    """A scheme that is not built in is looked up once among the entry points."""
    asked = []

    def entry_points(*, group, name):
        asked.append((group, name))
        return [EntryPoint(name, f"{__name__}:make_fake", group)]

    monkeypatch.setattr(registry_module, "entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", lambda _: make_fake)
    registry = builtin_registry()
    assert registry.make("pigeon://loft", context) == ("loft", context)
    assert registry.make("pigeon://loft", context) == ("loft", context)
    assert asked == [("kvservice.transports", "pigeon")]
