"""Slots reserved ahead of the keys that go into them.

A put that finds slots waiting asks the daemon once, at its end, and not twice. They
are asked for behind a put, in the size of that put, so the daemon finds them while
this process copies the next batch. Only writers that store batch after batch of one
size do it, and what they do not use goes back when it expires.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass

from kvclient import messages
from kvclient._backends.aio import BegunCall
from kvclient.aio.session import Session
from kvclient.holdings import Kind
from kvclient.results import Reservation
from kvproto.kv.v1 import lifecycle_service_pb2
from kvservice.core.errors import KvError
from kvservice.ports.methods import Method

BATCHES_AHEAD = 2
"""One that the daemon looks for while the other is being filled."""

ARENA_SHARE = 8
"""All that waits is at most one in so many bytes of the arena: it is kept from others."""

TIME_LEFT_MIN_S = 2.0
"""With less left a reservation could expire under the copy, before the next beat renews it."""

REQUEST_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for slots that is under way."""

    call: BegunCall
    epoch: int
    keys_count: int
    asked_s: float


class SlotsAhead:
    """The slots that wait for the puts of one namespace. Thread-safe.

    key_bytes: bytes of all parts of one key.
    """

    def __init__(self, session: Session, key_bytes: int) -> None:
        self._session = session
        self._key_bytes = key_bytes
        self._asked: deque[_Asked] = deque()
        self._last_count = 0

    async def take(self, keys_count: int, epoch: int) -> Reservation | None:
        """Return slots for exactly so many keys, held and renewed from now on; None if none wait."""
        while self._asked:
            try:
                asked = self._asked.popleft()
            except IndexError:
                return None  # Another thread was faster.
            if asked.epoch != epoch:
                continue  # They ended with their session.
            reservation = await self._arrived(asked)
            if reservation is None:
                continue
            has_time = reservation.deadline_s - time.monotonic() >= TIME_LEFT_MIN_S
            if has_time and asked.keys_count == keys_count:
                self._session.holdings.add(
                    reservation.reservation_id, Kind.RESERVATION, deadline_s=reservation.deadline_s
                )
                return reservation
            await self.give_back(reservation, epoch)
        return None

    async def ask(self, keys_count: int, space_ids: tuple[int, ...], epoch: int) -> None:
        """Ask for slots for later puts of this size, after two such puts in a row. Never raises."""
        is_repeated, self._last_count = keys_count == self._last_count, keys_count
        if not is_repeated:
            return
        batch_bytes = keys_count * self._key_bytes
        fitting_count = self._session.attachment.limits.arena_bytes // (ARENA_SHARE * batch_bytes)
        while len(self._asked) < min(BATCHES_AHEAD, fitting_count):
            request = lifecycle_service_pb2.ReserveRequest(
                request_id=os.urandom(REQUEST_ID_BYTES), space_ids=space_ids, unnamed_count=keys_count
            )
            asked_s = time.monotonic()
            call = await self._session.begin(Method.RESERVE, request, epoch=epoch)
            if call is None:
                return
            self._asked.append(_Asked(call, epoch, keys_count, asked_s))

    async def give_back(self, reservation: Reservation, epoch: int) -> None:
        """End a reservation that is not used. Never raises."""
        self._session.holdings.discard(reservation.reservation_id)
        request = lifecycle_service_pb2.AbortRequest(reservation_id=reservation.reservation_id)
        await self._session.post(Method.ABORT, request, lifecycle_service_pb2.AbortResponse, epoch=epoch)

    async def _arrived(self, asked: _Asked) -> Reservation | None:
        """Return what the daemon answered; None where it had no slots."""
        try:
            answer = await asked.call.finish(
                lifecycle_service_pb2.ReserveResponse, self._session.settings.call_timeout_s
            )
        except KvError:
            return None
        incarnation = self._session.attachment.daemon_incarnation
        return messages.reservation(answer, asked.asked_s, incarnation)
