"""One session with the daemon: connection, resumption, retries, beats, memory.

Everything above speaks to the daemon through `Session.call`. A lost connection is
resumed by token; where the daemon does not know the token any more (it restarted, or
ended the session) a new session begins: `epoch` moves, and what was granted is void.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvclient import messages
from kvclient._backends.aio import (
    BegunCall,
    Connection,
    EventSource,
    LaneConnection,
    SingleFlight,
    Ticker,
    from_threads,
    pause,
    run_blocking,
    take_news,
    wait_news,
)
from kvclient.config import ClientSettings
from kvclient.handoff_news import HandoffWatch
from kvclient.holdings import Holdings
from kvclient.local_memory import SEGMENTS_PER_CALL, LocalMemory
from kvclient.one_sided import LazyOneSided
from kvclient.plane import Plane, plane_of
from kvclient.results import Attachment, HandoffNews
from kvclient.retry import SAFE_TO_RETRY, Backoff
from kvclient.touch_ahead import TouchAhead
from kvproto.kv.v1 import local_lane_pb2, session_service_pb2
from kvservice.core.errors import (
    DeadlineError,
    DrainingError,
    InvariantError,
    KvError,
    PeerUnavailableError,
    SessionUnknownError,
    StaleIncarnationError,
)
from kvservice.ports.methods import Method
from kvservice.ports.one_sided import OneSided

_log = logging.getLogger("kvclient")

Answer = TypeVar("Answer", bound=Message)
Dial = Callable[[ClientSettings, Callable[[bytes], None], float], Awaitable[Connection]]

CALL_LIMIT_FACTOR = 2.0
"""A call keeps its own deadline; a thread that waits for one gives up only where the loop itself hangs."""

FIRST_TOUCH_LIMIT_S = 2.0
"""How long opening a namespace waits for its memory to be touched: six GiB of it."""


class Session:
    """Made by `KvClient.connect`; `open` before use, `close` after.

    dial: opens a connection; the network is an argument, so tests bring their own.
    endpoint: by which to lend and read memory, in place of the one that the settings name.
    """

    def __init__(self, settings: ClientSettings, dial: Dial, endpoint: OneSided | None = None) -> None:
        self.settings = settings
        self._dial = dial
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._attachment: Attachment | None = None
        self._connecting = SingleFlight()
        self._mapping = SingleFlight()
        self._backoff = Backoff()
        self._next_attempt_s = 0.0
        self._is_closed = False
        self._ticker = Ticker(self.beat, 1.0)
        self._touch_ahead = TouchAhead()
        self.holdings = Holdings(on_due=self._ticker.wake)
        self.offered = HandoffWatch()
        self.one_sided = LazyOneSided(settings.one_sided, endpoint)
        self._plane: Plane | None = None
        self.is_draining = False
        self._is_listening = False

    @property
    def attachment(self) -> Attachment:
        """The session as the daemon opened it. Raises PeerUnavailableError before `open`."""
        if self._attachment is None:
            raise PeerUnavailableError("no session was opened yet; connect first")
        return self._attachment

    @property
    def epoch(self) -> int:
        """Number of the session; moves when the daemon did not resume the one before."""
        return self.attachment.epoch

    async def open(self) -> None:
        """Connect and attach. Raises KvError when the daemon cannot be reached or refuses."""
        await self._reconnect(time.monotonic() + self.settings.connect_timeout_s, is_patient=False)
        self._ticker.start()

    async def close(self) -> None:
        """End the session, and every thread and task of it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # All of it is the parent's.
        await self._ticker.close()
        self._touch_ahead.close()
        connection = self._connection
        if connection is not None and connection.is_open:
            await self._detach(connection)
        if self._plane is not None:
            self._plane.close()  # First, so that what ends with the endpoint is not done by another way.
        self.one_sided.close()
        await self._abandon()

    def check_process(self) -> None:
        """Raise InvariantError in a child of a fork, where socket, memory and threads are the parent's."""
        if os.getpid() != self._pid:
            raise InvariantError(
                f"this client was connected by process {self._pid} and is used in its fork {os.getpid()}; "
                "connect in the child, after the fork"
            )

    async def call(
        self,
        method: Method,
        request: Message,
        response_type: type[Answer],
        *,
        epoch: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Send one request; resume and send once more where that is safe.

        epoch: the session that the request's handles belong to; None if it has none.

        Raises:
            StaleIncarnationError: the session of the handles is gone.
            PeerUnavailableError: the connection was lost, or cannot be made.
            DeadlineError: no answer in time.
            KvError: what the daemon answered.
        """
        self.check_process()
        end_s = time.monotonic() + (timeout_s or self.settings.call_timeout_s)
        connection = self._connection
        if connection is None or not connection.is_open:
            await self._reconnect(end_s, is_patient=False)
            connection = self._live()
        self._check_epoch(method, epoch)
        try:
            return await connection.call(method, request, response_type, _remaining_s(end_s))
        except PeerUnavailableError:
            if connection.is_open or method not in SAFE_TO_RETRY or self._is_closed:
                raise
        except SessionUnknownError:
            # Nothing was done, so even what is not idempotent may be sent again - by the
            # caller, if its handles died with the session.
            await connection.close()
        await self._reconnect(end_s, is_patient=True)
        self._check_epoch(method, epoch)
        return await self._live().call(method, request, response_type, _remaining_s(end_s))

    async def post(
        self, method: Method, request: Message, response_type: type[Message], *, epoch: int
    ) -> None:
        """Send a request that ends something, without waiting for the answer.

        Never raises: what does not arrive ends with its expiry or with the session.
        """
        connection = self._connection
        if connection is None or not connection.is_open or epoch != self.epoch or self._pid != os.getpid():
            return
        try:
            await connection.post(method, request, response_type)
        except KvError:
            return

    async def begin(self, method: Method, request: Message, *, epoch: int) -> BegunCall | None:
        """Send a request whose answer is taken later; None where that cannot be done. Never raises."""
        connection = self._connection
        if not isinstance(connection, LaneConnection) or not connection.is_open or epoch != self.epoch:
            return None
        try:
            return await connection.begin(method, request)
        except KvError:
            return None

    async def stream(
        self, method: Method, request: Message, response_type: type[Answer]
    ) -> EventSource[Answer]:
        """Open a call that is answered by many messages."""
        self.check_process()
        connection = self._connection
        if connection is None or not connection.is_open:
            await self._reconnect(time.monotonic() + self.settings.call_timeout_s, is_patient=False)
            connection = self._live()
        return connection.stream(method, request, response_type)

    async def listen(self) -> None:
        """See that what the daemon says unasked comes at once, and not with the next beat."""
        self._is_listening = True
        connection = self._connection
        if connection is not None and connection.is_open:
            await connection.listen(self._unasked)

    def take_news(self) -> None:
        """Deal with what the daemon has said unasked; asks and waits for nothing."""
        take_news(self._connection)

    async def wait_news(self, handoff_id: int, timeout_s: float) -> HandoffNews | None:
        """Wait for the release of a handoff that was offered; None where that takes longer."""
        return await wait_news(lambda: self._connection, self.offered, handoff_id, timeout_s)

    async def beat(self) -> None:
        """Renew what is held, report what was read, take revocations; the ticker calls it."""
        if self._is_closed:
            return
        attachment, beat = self.attachment, self.holdings.beat()
        limit = attachment.limits.max_batch_keys or 1
        memory = self.plane.memory
        touched = memory.drain_touches() if memory is not None else ([], [])
        noticed = self.offered.noticed()
        for request in messages.heartbeats(beat, touched, noticed, limit=limit):
            sent_s = time.monotonic()
            try:
                answer = await self.call(
                    Method.HEARTBEAT, request, session_service_pb2.HeartbeatResponse, epoch=attachment.epoch
                )
            except StaleIncarnationError:
                return  # A new session began with this very call; it holds nothing yet.
            deadline_s = sent_s + messages.seconds(answer.remaining)
            self.holdings.renewed(list(request.lease_ids), answer.lease_outcomes, deadline_s)
            self.holdings.renewed(list(request.reservation_ids), answer.reservation_outcomes, deadline_s)
            self.holdings.renewed(list(request.handoff_ids), answer.handoff_outcomes, deadline_s)
            self.holdings.acknowledged(list(request.acknowledged_ids))
            self.offered.acknowledged(request.noticed_handoff_ids)
            self.offered.told(answer.notices)
            self.holdings.revoke(list(answer.revoked_ids))

    # ---- bytes

    @property
    def plane(self) -> Plane:
        """The way to the bytes of this session. Raises PeerUnavailableError once the client is closed."""
        if self._plane is None:
            raise PeerUnavailableError("the client was closed; connect a new one")
        return self._plane

    async def prepare_memory(self) -> None:
        """Map what the tenant has now, and wait a little for its first touch."""
        memory = self.plane.memory
        if memory is not None:
            await self.map_segments(memory, [], directory=memory.directory is None)
            await run_blocking(functools.partial(self._touch_ahead.wait, FIRST_TOUCH_LIMIT_S))

    async def map_segments(self, memory: LocalMemory, segments: list[int], *, directory: bool) -> None:
        """Map segments (none: all that the tenant has), and the directory anew if asked.

        Raises:
            StaleIncarnationError: the memory is that of an earlier session.
        """
        action = functools.partial(self._map_segments, memory, segments, directory=directory)
        await self._mapping.run(action, self.settings.call_timeout_s)

    async def _map_segments(self, memory: LocalMemory, segments: list[int], *, directory: bool) -> None:
        wanted = list(segments)
        is_first = True
        while wanted or is_first:
            # In this order: a new session gets its plane before its connection, so a connection
            # taken before a look at the plane is never of a later life than the memory.
            connection = self._live()
            if self.plane.memory is not memory:
                raise StaleIncarnationError("the session ended while its memory was being mapped; try again")
            request = local_lane_pb2.MapSegmentsRequest(
                segments=wanted[:SEGMENTS_PER_CALL], directory=directory and is_first
            )
            answer, descriptors = await connection.map_segments(
                request, local_lane_pb2.MapSegmentsResponse, self.settings.call_timeout_s
            )
            unmapped = memory.install(answer, descriptors)
            wanted = wanted[SEGMENTS_PER_CALL:] if segments else unmapped
            is_first = False

    # ---- connection

    async def _reconnect(self, end_s: float, *, is_patient: bool) -> None:
        """See that there is a live connection; patient: try again until `end_s`."""
        action = functools.partial(self._connect, end_s, is_patient=is_patient)
        await self._connecting.run(action, _remaining_s(end_s))

    async def _connect(self, end_s: float, *, is_patient: bool) -> None:
        while self._connection is None or not self._connection.is_open:
            if self._is_closed:
                raise PeerUnavailableError("the client was closed; connect a new one")
            now_s = time.monotonic()
            wait_s = self._next_attempt_s - now_s
            if wait_s > 0 and not is_patient:
                # An engine would rather recompute than wait for a daemon that is down.
                raise PeerUnavailableError(f"the daemon is down; the next attempt is due in {wait_s:.2f} s")
            if now_s + max(wait_s, 0.0) >= end_s:
                raise PeerUnavailableError("the daemon did not come back before the deadline of the call")
            if wait_s > 0:
                await pause(wait_s)
            try:
                await self._attach(end_s)
            except (PeerUnavailableError, DeadlineError, DrainingError):
                self._next_attempt_s = time.monotonic() + self._backoff.next_s()
                if not is_patient:
                    raise

    async def _attach(self, end_s: float) -> None:
        """Open a connection and the session on it."""
        before = self._attachment
        if self._connection is not None:
            await self._connection.close()
        timeout_s = min(_remaining_s(end_s), self.settings.connect_timeout_s)
        connection = await self._dial(self.settings, self._unasked, timeout_s)
        try:
            request = messages.attach_request(self.settings, before)
            answer = await connection.call(
                Method.ATTACH, request, session_service_pb2.AttachResponse, timeout_s
            )
        except BaseException:
            await connection.close()
            raise
        connection.bind(answer.session_token)
        if self._is_listening:
            await connection.listen(self._unasked)
        self._attachment = messages.attachment(answer, before)
        if before is None or self._attachment.epoch != before.epoch:
            self._begin_epoch(self._attachment)
        self._ticker.interval_s = self._attachment.renew_interval_s
        self._backoff.reset()
        self._connection = connection
        if self._is_closed:
            # Closed meanwhile, by one who could not know of this session yet.
            await self._detach(connection)
            await self._abandon()
            raise PeerUnavailableError("the client was closed; connect a new one")

    def _begin_epoch(self, attachment: Attachment) -> None:
        """Drop what belonged to the session before."""
        self.holdings.clear()
        self.offered.session_lost()
        self.is_draining = False
        before, settings = self._plane, self.settings
        # Handles of this session are void in the next one, and so are calls about them.
        call = functools.partial(self.call, epoch=attachment.epoch)
        self._plane = plane_of(
            attachment,
            settings,
            touch_ahead=self._touch_ahead,
            one_sided=self.one_sided,
            call=from_threads(call, CALL_LIMIT_FACTOR * settings.call_timeout_s),
        )
        if before is not None:
            before.close()

    async def _detach(self, connection: Connection) -> None:
        try:
            await connection.call(
                Method.DETACH,
                session_service_pb2.DetachRequest(),
                session_service_pb2.DetachResponse,
                self.settings.call_timeout_s,
            )
        except KvError:
            return  # The session ends with the process, or by its missing beats.

    async def _abandon(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._plane is not None:
            self._plane.close()
            self._plane = None

    def _unasked(self, body: bytes) -> None:
        """Take what the daemon says unasked."""
        try:
            notice = session_service_pb2.StreamResponse.FromString(body)
        except DecodeError as error:
            # It belongs to no call that could fail; the next beat asks for the same.
            _log.warning("a notice of the daemon cannot be parsed: %s", error)
            return
        if notice.draining:
            self.is_draining = True
        self.holdings.revoke(list(notice.revoked_ids))
        self.offered.told(notice.notices)

    def _live(self) -> Connection:
        connection = self._connection
        if connection is None or not connection.is_open:
            raise PeerUnavailableError("the connection to the daemon was lost")
        return connection

    def _check_epoch(self, method: Method, epoch: int | None) -> None:
        if epoch is not None and epoch != self.epoch:
            raise StaleIncarnationError(
                f"{method.name}: its handles are of session {epoch} of this client, now it is {self.epoch}: "
                "the daemon restarted or ended the session; open, reserve or acquire again"
            )


def _remaining_s(end_s: float) -> float:
    """Return the time left: a millisecond at least, so that what is overdue still fails by itself."""
    return max(end_s - time.monotonic(), 0.001)
