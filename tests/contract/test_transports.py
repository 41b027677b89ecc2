"""The transport contract, over each transport."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from kvservice.core.errors import InvalidFieldError, NoWayError, PeerUnavailableError, StaleGenerationError
from kvservice.native import fallback
from kvservice.transports import shm
from kvservice.transports.inproc import InprocTransport
from kvservice.transports.segments import MappedSegment
from kvservice.transports.shm import SegmentMap, ShmTransport
from kvservice.transports.tcp import TcpServer, TcpTransport
from kvservice.transports.ucx.arena_transport import UcxTransport
from tests.contract.lent_owner import ROADS, Lending, LentOwner
from tests.contract.transport_contract import (
    TOKEN,
    Harness,
    OwnerCheckedContract,
    TransportContract,
    a_read,
    a_write,
    at_end,
    slots_of,
)
from tests.contract.transport_fakes import FakeOwner


@pytest.fixture
def owner():
    """An owner of two segments."""
    owner = FakeOwner()
    yield owner
    owner.close()


class TestInproc(OwnerCheckedContract):
    """The transport within one process."""

    @pytest.fixture
    def harness(self, owner):
        def connect(token: bytes) -> InprocTransport:
            return InprocTransport(owner, lambda: token)

        return Harness(owner, connect(TOKEN), connect, lambda action: at_end(owner, action))


class TestTcp(OwnerCheckedContract):
    """The tcp data plane over the loopback."""

    @pytest.fixture
    def harness(self, owner):
        server = TcpServer("127.0.0.1:0", owner)
        address = server.start()
        with contextlib.ExitStack() as stack:
            stack.callback(server.stop)

            def connect(token: bytes) -> TcpTransport:
                transport = TcpTransport(address, lambda: token)
                stack.callback(transport.close)
                return transport

            yield Harness(owner, connect(TOKEN), connect, lambda action: at_end(owner, action))


@pytest.fixture(scope="module", params=ROADS)
def lending(request):
    """A process that lends segments, over each road that UCX has on one host."""
    lending = Lending(ROADS[request.param])
    yield lending
    lending.close()


class TestUcx(OwnerCheckedContract):
    """One-sided operations on segments that another process lends."""

    @pytest.fixture
    def harness(self, owner, lending):
        numbers = lending.lend(owner)

        def connect(token: bytes) -> UcxTransport:
            authority = LentOwner(owner, lending, numbers, token)
            return UcxTransport(authority, lambda: lending.endpoint, lending.endpoint.write)

        yield Harness(owner, connect(TOKEN), connect, lambda action: at_end(owner, action))
        lending.take_back(numbers)

    def test_nothing_is_stored_one_sidedly_without_leave(self, harness, owner, lending):
        """Who may not write asks for no grant, and is told to write by another way."""
        numbers = lending.lend(owner)
        moved, capability, _ = a_write(owner, [[1000]])
        before = slots_of(owner, capability)
        reader = UcxTransport(LentOwner(owner, lending, numbers, TOKEN), lambda: lending.endpoint)
        with pytest.raises(NoWayError):
            reader.write(moved)
        assert slots_of(owner, capability) == before
        assert not owner.begun
        lending.take_back(numbers)


class TestShm(TransportContract):
    """Mapped segments: the same memory as the owner's, through other addresses."""

    @pytest.fixture
    def harness(self, owner, monkeypatch):
        mapping = SegmentMap()
        for number, segment in enumerate(owner.segments):
            mapped = MappedSegment.map(
                os.dup(segment.fd),
                segment.size_bytes,
                os.dup(segment.generations_fd),
                segment.generations_bytes,
            )
            mapping.add(number, mapped)

        @contextlib.contextmanager
        def during(action: Callable[[], None]):
            # The fallback, since its copy can be interrupted at a known point; that the C
            # extension looks again after the copy is shown in tests/unit/native.
            copy_blocks = fallback.copy_blocks

            def copy_and_act(*arguments: object) -> None:
                copy_blocks(*arguments)
                action()

            with monkeypatch.context() as patch:
                patch.setattr(fallback, "copy_blocks", copy_and_act)
                patch.setattr(shm, "native", SimpleNamespace(copy_slots=fallback.copy_slots))
                yield

        yield Harness(owner, ShmTransport(mapping), lambda _: ShmTransport(mapping), during)
        mapping.close()

    def test_views_show_the_slots_and_cannot_be_written(self, harness):
        """A view is the slot itself: it follows a change, and refuses one."""
        moved, capability, _ = a_read(harness.owner, [[1000], [513], [4096]])
        views = harness.transport.views(moved.slots, moved.lengths)
        assert [bytes(view) for view in views] == slots_of(harness.owner, capability)
        harness.owner.bytes_of(capability, 1)[0] ^= 1
        assert [bytes(view) for view in views] == slots_of(harness.owner, capability)
        with pytest.raises(TypeError):
            views[0][0] = 1

    def test_views_of_a_recycled_slot_are_refused(self, harness):
        """A view is given only of a slot that still has its owner."""
        moved, capability, _ = a_read(harness.owner, [[1000]] * 3)
        harness.owner.recycle(capability, 1)
        with pytest.raises(StaleGenerationError):
            harness.transport.views(moved.slots, moved.lengths)

    def test_a_segment_that_is_not_mapped_is_named(self, harness):
        """A transfer of an unmapped segment says which one to map."""
        moved, _, _ = a_read(harness.owner, [[1000]])
        for number in (2, 70_000):
            moved.slots.segments[:] = number
            with pytest.raises(PeerUnavailableError, match=str(number)):
                harness.transport.read(moved)

    def test_a_slot_past_the_end_of_its_segment_is_refused(self, harness):
        """Nothing is copied from or to beyond a segment, however large the offset."""
        moved, _, _ = a_read(harness.owner, [[1000]])
        for granule in (harness.owner.segment_bytes // 512 - 1, 0xFFFFFFFF):
            moved.slots.granules[:] = granule
            with pytest.raises(InvalidFieldError):
                harness.transport.read(moved)


def test_the_map_of_segments_knows_what_is_missing(owner):
    """`missing` names each unmapped number once, and bases hold 0 for what is not mapped."""
    mapping = SegmentMap()
    segment = owner.segments[0]
    mapped = MappedSegment.map(
        os.dup(segment.fd),
        segment.size_bytes,
        os.dup(segment.generations_fd),
        segment.generations_bytes,
    )
    mapping.add(2, mapped)
    assert mapping.missing(np.array([5, 2, 0, 5, 2], np.uint32)) == [0, 5]
    assert mapping.bases.tolist() == [0, 0, mapped.address]
    assert mapping.generation_bases.tolist() == [0, 0, mapped.generations_address]
    mapping.close()
    assert mapping.missing(np.array([2], np.uint32)) == [2]
    assert mapped.is_unmapped


def test_a_segment_is_unmapped_when_the_last_view_of_it_is_gone(owner):
    """Removing a segment never pulls memory from under a view or a transfer."""
    mapping = SegmentMap()
    segment = owner.segments[0]
    mapping.add(
        0,
        MappedSegment.map(
            os.dup(segment.fd),
            segment.size_bytes,
            os.dup(segment.generations_fd),
            segment.generations_bytes,
        ),
    )
    segment.memory.view[:4] = b"kept"
    view = mapping.snapshot().views[0][:4]
    removed = mapping.remove(0)
    assert removed is not None
    assert not removed.is_unmapped
    assert bytes(view) == b"kept"
    del view
    assert removed.is_unmapped
    assert mapping.remove(0) is None
