"""Builds a daemon from its parts. No decisions but which part goes where."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvservice
from kvservice import native
from kvservice.core.books import COUNTER_BITS
from kvservice.core.errors import ArenaFullError, InvariantError, NoWayError
from kvservice.core.events import Drain, WritersCut
from kvservice.core.limits import Limits
from kvservice.core.one_sided_desk import uncut_transfers
from kvservice.core.records import Notice
from kvservice.core.state import KvState
from kvservice.daemon.config import ConfigError, Settings, lender_environment, read_server_key
from kvservice.engine.clock import LONGEST_GAP_NS, StallAwareClock
from kvservice.engine.coordinator import ArenaAuthority, Coordinator
from kvservice.engine.reaper import Reaper
from kvservice.engine.ucx_arena import LentArena, UcxArena
from kvservice.engine.verification import Verifier
from kvservice.service.credentials import Credentials
from kvservice.service.dispatcher import Dispatcher, Facts
from kvservice.service.event_feed import EventFeed
from kvservice.service.grpc_server import GrpcServer
from kvservice.service.lane_server import LaneServer
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.tcp import TcpServer

_log = logging.getLogger(__name__)

NANOSECONDS_PER_MS = 1_000_000
MEMORY_SHARE = 0.9
"""An arena may take so much of the memory that is available at the start."""

DRAIN_POLL_S = 0.02


class NotEnoughMemoryError(Exception):
    """The machine cannot hold the arena; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the daemon listens; empty where it does not. Ports are the real ones."""

    socket_path: str
    grpc_address: str
    tcp_address: str


class Daemon:
    """One daemon: `start`, then `stop`; both once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limits = limits_of(settings)
        self.broken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._tcp: TcpServer | None = None
        self._grpc: GrpcServer | None = None
        self._lane: LaneServer | None = None
        self._arena: LentArena | None = None
        self._lender: UcxArena | None = None
        self._coordinator: Coordinator | None = None

    async def start(self) -> Endpoints:
        """Build everything and listen.

        Raises:
            OSError: an address is in use or cannot be had.
            NotEnoughMemoryError: the arena does not fit.
            ConfigError: UCX is asked for, and cannot be used here.
        """
        settings, limits = self._settings, self._limits
        check_memory(limits.arena_bytes)
        try:
            arena = LentArena(segments_count=limits.segments_count, segment_bytes=limits.segment_bytes)
        except ArenaFullError as error:
            raise NotEnoughMemoryError(error.message) from error
        self._arena = arena
        incarnation = secrets.token_bytes(16)
        state = KvState(
            limits,
            life=secrets.randbits(64 - COUNTER_BITS),
            memory=arena,
            operations=native,
            server_key=read_server_key(settings.security),
        )
        longest_gap_ns = min(LONGEST_GAP_NS, (limits.default_ttl_ns - limits.renew_interval_ns) // 2)
        clock = StallAwareClock(time.monotonic_ns, longest_gap_ns=longest_gap_ns)
        coordinator = Coordinator(state, arena=arena, clock=clock)
        self._coordinator = coordinator
        tcp_address = self._start_tcp(ArenaAuthority(coordinator, arena))
        await self._start_lender(coordinator, arena)
        facts = Facts(
            version=kvservice.__version__,
            incarnation=incarnation,
            limits=limits,
            has_native=native.IS_NATIVE,
            socket_path=settings.server.socket_path,
            tcp_address=tcp_address,
        )
        dispatcher = Dispatcher(coordinator, Verifier(coordinator, arena), facts, self._lender)
        credentials = credentials_of(settings)
        feed = EventFeed(coordinator, incarnation)
        self._lane = LaneServer(
            dispatcher=dispatcher,
            coordinator=coordinator,
            arena=arena,
            credentials=credentials,
            feed=feed,
        )
        self._grpc = GrpcServer(dispatcher=dispatcher, credentials=credentials, feed=feed)
        self._connect_listeners(coordinator, feed)
        self._lane.start(settings.server.socket_path)
        grpc_address = await self._start_grpc()
        if settings.arena.touch_ahead:
            arena.start_touching_ahead()
        self._supervise(Reaper(coordinator, longest_sleep_s=longest_gap_ns / 1.5e9).run(), "reaper")
        return Endpoints(settings.server.socket_path, grpc_address, tcp_address)

    async def stop(self) -> None:
        """Drain, then stop: new work is refused, open work may end in time."""
        drain_s = self._settings.server.drain_timeout_ms / 1000
        if self._coordinator is not None:
            self._coordinator.submit(Drain())
            if self._lane is not None:
                self._lane.announce_drain()
            if self._grpc is not None:
                await self._grpc.announce_drain()
            await self._wait_until_idle(self._coordinator, drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._grpc is not None:
            await self._grpc.stop(min(drain_s, 1.0))
        if self._lane is not None:
            self._lane.stop()
        if self._tcp is not None:
            await asyncio.to_thread(self._tcp.stop)
        if self._lender is not None:
            await asyncio.to_thread(self._lender.stop)
        if self._arena is not None:
            self._arena.close()

    def _start_tcp(self, authority: ArenaAuthority) -> str:
        listen = self._settings.server.tcp_listen
        if not listen:
            return ""
        self._tcp = TcpServer(
            listen, authority, max_connections_count=self._settings.limits.max_tcp_connections
        )
        return self._tcp.start()

    async def _start_lender(self, coordinator: Coordinator, arena: LentArena) -> None:
        """Lend the arena over UCX, if that is asked for."""
        settings = self._settings.ucx
        if settings.enabled == "off":
            return
        lender = UcxArena(
            EndpointSettings("ucx", settings.library, settings.transports, settings.devices),
            lender_environment(),
            uncut=lambda: coordinator.look(lambda state, _: uncut_transfers(state.books)),
            cut=lambda transfer_ids: coordinator.submit(WritersCut(transfer_ids)),
        )
        segments = {number: arena.segment(number) for number in range(self._limits.segments_count)}
        try:
            await asyncio.to_thread(lender.start, segments)
        except NoWayError as error:
            raise ConfigError(f'ucx.enabled = "on": {error.message}', "ucx.enabled") from error
        self._lender = arena.lender = lender

    async def _start_grpc(self) -> str:
        listen = self._settings.server.grpc_listen
        if not listen or self._grpc is None:
            return ""
        port = await self._grpc.start(listen)
        return f"{listen.rpartition(':')[0]}:{port}"

    def _connect_listeners(self, coordinator: Coordinator, feed: EventFeed) -> None:
        """Hand the coordinator's news, from whatever thread, to the event loop."""
        loop = asyncio.get_running_loop()
        loop_thread = threading.get_ident()
        lane, grpc_server, lender = self._lane, self._grpc, self._lender
        assert lane is not None and grpc_server is not None  # noqa: S101, PT018 - built just before

        def on_loop(call: Callable[..., Any]) -> Callable[..., None]:
            def post(*arguments: Any) -> None:
                if threading.get_ident() == loop_thread:
                    call(*arguments)  # Waking the loop that runs us would cost a system call.
                    return
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                    loop.call_soon_threadsafe(call, *arguments)

            return post

        def revoke(token: bytes, capability_id: int) -> None:
            lane.revoke(token, capability_id)
            grpc_server.revoke(token, capability_id)

        def broken(error: InvariantError) -> None:
            _log.critical("an invariant is broken; stopping", extra={"rule": error.message})
            self.broken.set()

        coordinator.on_revoke = on_loop(revoke)

        def notify(token: bytes, notice: Notice) -> None:
            lane.notify(token, notice)
            grpc_server.notify(token, notice)

        coordinator.on_notice = on_loop(notify)

        def session_ended(token: bytes) -> None:
            lane.session_ended(token)
            grpc_server.session_ended(token)
            if lender is not None:
                lender.look_again()  # It may have left writes that are to be cut off.

        coordinator.on_session_end = on_loop(session_ended)
        coordinator.on_news = on_loop(feed.wake)
        coordinator.on_broken = on_loop(broken)

    def _supervise(self, work: Any, name: str) -> None:
        """Run a task whose end is the daemon's end."""
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)

        def ended(done: asyncio.Task[None]) -> None:
            if not done.cancelled():
                _log.critical("task %s ended", name, exc_info=done.exception())
                self.broken.set()

        task.add_done_callback(ended)
        self._tasks.append(task)

    async def _wait_until_idle(self, coordinator: Coordinator, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        # Polled: ends come from three edges, and a stop may be late by one poll.
        while time.monotonic() < deadline and coordinator.look(_is_busy):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)


def _is_busy(state: KvState, now_ns: int) -> bool:
    del now_ns
    books = state.books
    is_passing = any(handoff.claimer is not None for handoff in books.handoffs.values())
    return bool(books.reservations or books.leases or books.transfers or is_passing)


def limits_of(settings: Settings) -> Limits:
    """Return the bounds that the settings ask for."""
    return Limits(
        max_batch_keys=settings.limits.max_batch_keys,
        default_ttl_ns=settings.lease.ttl_ms * NANOSECONDS_PER_MS,
        max_ttl_ns=settings.lease.max_ttl_ms * NANOSECONDS_PER_MS,
        renew_interval_ns=settings.lease.renew_interval_ms * NANOSECONDS_PER_MS,
        heartbeat_timeout_ns=settings.lease.heartbeat_timeout_ms * NANOSECONDS_PER_MS,
        max_sessions=settings.limits.max_sessions,
        max_reservations=settings.limits.max_reservations_per_session,
        max_leases=settings.limits.max_leases_per_session,
        max_handoffs=settings.limits.max_handoffs_per_session,
        max_engine_segments=settings.limits.max_segments_per_session,
        max_layouts=settings.limits.max_segments_per_session,
        handoff_hold_ns=settings.lease.handoff_hold_ms * NANOSECONDS_PER_MS,
        operation_bound_ns=settings.lease.operation_bound_ms * NANOSECONDS_PER_MS,
        event_history_count=settings.limits.event_history,
        segment_bytes=settings.arena.segment_bytes,
        segments_count=settings.arena.capacity_bytes // settings.arena.segment_bytes,
        quotas_bytes=tuple((tenant.name, tenant.quota_bytes) for tenant in settings.tenants),
    )


def credentials_of(settings: Settings) -> Credentials:
    """Return the table of tenants that the settings declare."""
    by_token = {bytes.fromhex(t.token_sha256): t.name for t in settings.tenants if t.token_sha256}
    by_uid = {uid: tenant.name for tenant in settings.tenants for uid in tenant.uids}
    open_default = all(t.name != "default" or not t.token_sha256 for t in settings.tenants)
    return Credentials(by_token, by_uid, default_is_open=open_default)


def check_memory(arena_bytes: int) -> None:
    """Raise NotEnoughMemoryError if the machine has too little memory free."""
    available = available_memory_bytes()
    if arena_bytes > available * MEMORY_SHARE:
        raise NotEnoughMemoryError(
            f"arena.capacity_bytes = {arena_bytes}: only {available} bytes of memory are available "
            f"and {MEMORY_SHARE:.0%} of them may be used; ask for {int(available * MEMORY_SHARE)} or less"
        )


def available_memory_bytes() -> int:
    """Return the memory that can be had without swapping."""
    with contextlib.suppress(OSError), Path("/proc/meminfo").open(encoding="ascii") as report:
        for line in report:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
