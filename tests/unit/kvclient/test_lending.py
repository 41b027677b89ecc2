"""What a process lends is registered as long as it is lent, and what it loads is loaded when it is needed."""

import threading
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from kvclient import BlockPool, InvalidFieldError, NoWayError, PeerUnavailableError
from kvclient import one_sided as one_sided_module
from kvclient.errors import SegmentUnknownError
from kvclient.lending import Lending
from kvclient.one_sided import LazyOneSided
from kvclient.results import LentPool
from kvservice.core.engine_memory import MemoryKind, SegmentWay
from kvservice.transports import one_sided as one_sided_transports
from kvservice.transports.one_sided import (
    ENTRY_POINT_GROUP,
    EndpointSettings,
    make_endpoint,
    usable_transports,
)

WAIT_S = 5.0
NOTHING = EndpointSettings(transport="")


class FakeMemory:
    """Memory that an endpoint was asked to lend."""

    def __init__(self, endpoint, address, size_bytes, kind):
        self.endpoint = endpoint
        self.address, self.size_bytes, self.kind = address, size_bytes, kind
        self.ways = (SegmentWay("fake", b"", address.to_bytes(8, "little")),)
        endpoint.lent.append(self)

    def close(self):
        if self in self.endpoint.lent:
            self.endpoint.lent.remove(self)


class FakeEndpoint:
    """An endpoint that lends anything, until it shall refuse."""

    transport = "fake"

    def __init__(self):
        self.lent = []
        self.refuses_after = 1000
        self.is_closed = False

    def lend(self, address, size_bytes, kind):
        if len(self.lent) >= self.refuses_after:
            raise InvalidFieldError("no more of it")
        return FakeMemory(self, address, size_bytes, kind)

    def read(self, read):
        raise NotImplementedError

    def close(self):
        self.is_closed = True


class FakeEndpointOf(FakeEndpoint):
    """An endpoint that an installed package would make."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings


@pytest.fixture
def endpoint():
    """An endpoint that lends anything."""
    return FakeEndpoint()


@pytest.fixture
def lending(endpoint):
    """What a client lends by it."""
    return Lending(LazyOneSided(NOTHING, endpoint))


def pools_of(*segments_counts):
    """Return a pool of so many segments for each number."""
    return [BlockPool.of([np.zeros((4, 64), np.uint8) for _ in range(count)]) for count in segments_counts]


def named(*layout_ids):
    """Return pools as the daemon calls them."""
    return [LentPool(layout_id, (), 4, 64, 1) for layout_id in layout_ids]


def test_every_segment_of_every_pool_is_lent(endpoint, lending):
    """In their order, as what they are, and their ways are what the daemon passes on."""
    pools = pools_of(2, 1)
    device = BlockPool([1 << 30], pools[1].geometry, MemoryKind.CUDA, None)
    lent = lending.lend([*pools, device])
    addresses = [*pools[0].addresses.tolist(), *pools[1].addresses.tolist(), 1 << 30]
    assert [one.address for one in endpoint.lent] == addresses
    assert [one.size_bytes for one in endpoint.lent] == [256] * 4
    assert [one.kind for one in endpoint.lent] == [MemoryKind.HOST] * 3 + [MemoryKind.CUDA]
    assert [ways[0].key for ways in lent.ways] == [address.to_bytes(8, "little") for address in addresses]
    lent.close()
    lent.close()
    assert endpoint.lent == []


@pytest.mark.parametrize("refuses_after", [0, 1, 2, 3])
def test_what_cannot_be_lent_whole_is_not_lent(endpoint, lending, refuses_after):
    """A refusal in the middle gives back what was registered before it."""
    endpoint.refuses_after = refuses_after
    with pytest.raises(InvalidFieldError, match="no more"):
        lending.lend(pools_of(2, 2))
    assert endpoint.lent == []


def test_a_pool_that_is_taken_back_is_lent_no_more(endpoint, lending):
    """At once, whatever it was lent together with: its owner is free to unmap it."""
    pools = pools_of(2, 1)
    lending.keep(named(7, 8), lending.lend(pools))
    assert lending.pools_of(named(8, 7)) == [pools[1], pools[0]]
    lending.drop(named(7))
    assert [one.address for one in endpoint.lent] == pools[1].addresses.tolist()
    lending.drop(named(7, 9))
    assert lending.pools_of(named(8)) == [pools[1]]
    with pytest.raises(SegmentUnknownError, match="layout 7 is not lent by this process"):
        lending.pools_of(named(8, 7))
    lending.drop(named(8))
    assert endpoint.lent == []


def test_the_end_of_a_client_lends_nothing(endpoint, lending):
    """Whatever it had lent, in however many registrations."""
    lending.keep(named(1, 2), lending.lend(pools_of(1, 1)))
    lending.keep(named(3), lending.lend(pools_of(2)))
    lending.close()
    lending.close()
    assert endpoint.lent == []
    with pytest.raises(SegmentUnknownError):
        lending.pools_of(named(3))


def test_an_endpoint_that_is_given_is_used_and_closed(endpoint):
    """It stands in place of the one that the settings name."""
    lazy = LazyOneSided(EndpointSettings(), endpoint)
    assert lazy.transports() == ["fake"]
    assert lazy.endpoint() is endpoint
    lazy.close()
    lazy.close()
    assert endpoint.is_closed
    with pytest.raises(PeerUnavailableError, match="closed"):
        lazy.endpoint()


def test_a_process_may_have_no_endpoint():
    """Then it has no way to lend or to read, says so, and loads nothing."""
    lazy = LazyOneSided(NOTHING)
    assert lazy.transports() == []
    with pytest.raises(NoWayError, match="the settings name no transport"):
        lazy.endpoint()
    with pytest.raises(NoWayError):
        Lending(lazy).lend(pools_of(1))
    lazy.close()
    with pytest.raises(PeerUnavailableError):
        lazy.endpoint()


def test_an_endpoint_is_made_once_and_when_it_is_needed(monkeypatch):
    """Threads that need it at once get the same one; a client that needs none never makes it."""
    made, looked = [], []

    def make(settings):
        made.append(settings)
        return FakeEndpoint()

    def look(settings):
        looked.append(settings)
        return ["fake"]

    monkeypatch.setattr(one_sided_module, "make_endpoint", make)
    monkeypatch.setattr(one_sided_module, "usable_transports", look)
    unused = LazyOneSided(EndpointSettings())
    assert unused.transports() == unused.transports() == ["fake"]
    assert len(looked) == 1
    unused.close()
    assert made == []
    lazy, found, barrier = LazyOneSided(EndpointSettings()), [], threading.Barrier(8)

    def need():
        barrier.wait(WAIT_S)
        found.append(lazy.endpoint())

    threads = [threading.Thread(target=need) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(made) == len(set(found)) == 1
    assert lazy.transports() == ["fake"]
    lazy.close()
    assert found[0].is_closed


def test_an_endpoint_that_cannot_be_made_is_asked_for_again(monkeypatch):
    """A failure is not remembered: the library may be there the next time."""
    found = [None]

    def make(settings):
        if found[0] is None:
            raise NoWayError("not here")
        return found[0]

    monkeypatch.setattr(one_sided_module, "make_endpoint", make)
    lazy = LazyOneSided(EndpointSettings())
    with pytest.raises(NoWayError, match="not here"):
        lazy.endpoint()
    found[0] = FakeEndpoint()
    assert lazy.endpoint() is found[0]


def test_a_transport_that_nobody_offers_is_no_way():
    """It is usable by nobody, and the error says where it was looked for."""
    settings = EndpointSettings(transport="no such transport")
    assert usable_transports(settings) == []
    with pytest.raises(NoWayError, match=r"kvservice\.one_sided"):
        make_endpoint(settings)
    assert usable_transports(NOTHING) == []
    assert make_endpoint(NOTHING) is None


def test_a_transport_may_be_installed(monkeypatch):
    """It is made with the settings; one that is installed and broken is no way, and not a crash."""
    installed = {
        "good": EntryPoint("good", "tests.unit.kvclient.test_lending:FakeEndpointOf", ENTRY_POINT_GROUP),
        "broken": EntryPoint("broken", "tests.no_such_module:Endpoint", ENTRY_POINT_GROUP),
        "empty": EntryPoint("empty", "tests.unit.kvclient.test_lending:NoSuchThing", ENTRY_POINT_GROUP),
    }

    def find(*, group, name):
        assert group == ENTRY_POINT_GROUP
        return [installed[name]] if name in installed else []

    monkeypatch.setattr(one_sided_transports, "entry_points", find)
    settings = EndpointSettings(transport="good", devices="eth0")
    assert usable_transports(settings) == ["good"]
    assert make_endpoint(settings).settings == settings
    for name in ("broken", "empty"):
        with pytest.raises(NoWayError, match=f"{name} cannot be used here"):
            make_endpoint(EndpointSettings(transport=name))


@pytest.mark.parametrize("name", ["transport", "library", "transports", "devices"])
@pytest.mark.parametrize("value", ["x" * 1025, "a\nb", "\0"])
def test_settings_of_an_endpoint_are_held_to_their_limits(name, value):
    """They go to a library in C, which would take them as they are."""
    with pytest.raises(InvalidFieldError, match=f"{name} is"):
        EndpointSettings(**{name: value})
