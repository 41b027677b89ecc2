"""The fake owner of the transport contract behind a process that lends its segments over UCX."""

from __future__ import annotations

import itertools
import os
import select
import time

import numpy as np
import pytest

from kvservice.core.errors import NoWayError
from kvservice.core.slots import I64, U32
from kvservice.engine.ucx_arena import UcxArena
from kvservice.native import ucx
from kvservice.ports.transport import Grant
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx import UcxEndpoint
from kvservice.transports.ucx.arena_transport import RemoteGrant
from tests.contract.transport_fakes import FakeOwner

WAIT_S = 20.0
ROADS = {"any": "", "tcp": "tcp"}
"""What UCX may use: CMA does the work on one host unless it may use tcp alone."""


class Lending:
    """A lending process, and an endpoint here that reaches it; for many owners, one after the other."""

    def __init__(self, transports: str) -> None:
        reason = ucx.why_not()
        if reason:
            pytest.skip(reason)
        settings = EndpointSettings(transports=transports, devices="lo")
        plain = {name: value for name, value in os.environ.items() if not name.startswith("KVSERVICE_")}
        self.arena = UcxArena(settings, plain, uncut=tuple, cut=lambda _: None)
        try:
            self.arena.start({})
        except NoWayError as error:
            pytest.skip(str(error))
        self.endpoint = UcxEndpoint(settings)
        self._numbers = itertools.count(1)

    def lend(self, owner: FakeOwner) -> list[int]:
        """Lend the segments of an owner; return their numbers."""
        numbers = [next(self._numbers) for _ in owner.segments]
        for number, segment in zip(numbers, owner.segments, strict=True):
            self.arena.add(number, segment)
        end_s = time.monotonic() + WAIT_S
        while not self._has(numbers):
            assert time.monotonic() < end_s, "the segments were not lent"
            select.select([], [], [], 0.002)
        return numbers

    def take_back(self, numbers: list[int]) -> None:
        """Lend them no more."""
        for number in numbers:
            self.arena.drop(number)

    def close(self) -> None:
        """End the process."""
        self.endpoint.close()
        self.arena.stop()

    def _has(self, numbers: list[int]) -> bool:
        try:
            return bool(self.arena.segments(numbers))
        except NoWayError:
            return False


class LentOwner:
    """RemoteAuthority of one session over a fake owner."""

    def __init__(self, owner: FakeOwner, lending: Lending, numbers: list[int], token: bytes) -> None:
        self._owner = owner
        self._segments = lending.arena.segments(numbers)
        self._token = token
        self.settled: list[bool] = []

    def begin_write(self, *, reservation_id: int, slot_indexes: I64, timeout_s: float) -> RemoteGrant:
        grant = self._owner.begin_write(
            session_token=self._token, reservation_id=reservation_id, slot_indexes=slot_indexes
        )
        return self._remote(grant, timeout_s)

    def begin_read(self, *, lease_id: int, slot_indexes: I64, timeout_s: float) -> RemoteGrant:
        grant = self._owner.begin_read(
            session_token=self._token, lease_id=lease_id, slot_indexes=slot_indexes
        )
        return self._remote(grant, timeout_s)

    def end(self, transfer_id: int, *, checksums: U32 | None, is_settled: bool) -> None:
        self.settled.append(is_settled)
        self._owner.end(transfer_id, checksums=checksums)

    def _remote(self, grant: Grant, timeout_s: float) -> RemoteGrant:
        bases = np.array([segment.address for segment in self._owner.segments], np.uint64)
        indexes = (grant.addresses[:, None] - bases[None, :] < self._owner.segment_bytes).argmax(axis=1)
        return RemoteGrant(
            grant.transfer_id,
            self._segments,
            indexes.astype(np.uint32),
            grant.addresses - bases[indexes],
            grant.lengths,
            grant.checksums,
            time.monotonic() + timeout_s,
        )
