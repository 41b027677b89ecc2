"""The arena lent to readers of other processes, through a process of its own.

The daemon never loads UCX: an rkey protects nothing, over tcp a bad address crashes whoever it reaches, and
UCX 1.22 aborts a process that cannot send its reply to a reader which has given up. So another process lends
the segments (`transports.ucx.arena_child`), and this supervises it: hands it the segments that there are,
knows the ways that its present life has, and starts another when it dies. The ways of an earlier life lead
nowhere, since an address names the process's start.

It also is what cuts writers off. A one-sided write that failed may have bytes on their way to that process;
they are certain to arrive nowhere once it is dead. So it is killed then, which costs the others a transfer
that they do again.

Locks: the coordinator's, then the one here; nothing is asked of the coordinator under the latter.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kvservice.core.engine_memory import EngineSegment
from kvservice.core.errors import KvError, NoWayError
from kvservice.engine.arena import Arena
from kvservice.engine.lender_process import LenderProcess
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.segments import OwnedSegment
from kvservice.transports.ucx.arena_frames import LenderFacts

_log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.1
BACKOFF_LIMIT_S = 30.0
"""A peer that crashes it again and again costs a start of it in so many seconds."""

BACKOFF_FACTOR = 2.0
HEALTHY_S = 60.0
"""Who has lived for so long begins anew with the pauses."""

PEER_TO_BLAME = "a peer used a bad address, or went away in the middle of a read"
"""Over tcp UCX ends the process on its own for either."""

_NO_FACTS = LenderFacts("", ())


class UcxArena:
    """`start`, then `stop`; both once. Other methods may be called from any thread, and do not wait.

    environment: of the process that lends; it can be read by every peer.
    uncut: returns the writes that wait to be cut off; `cut` is told of those that have been.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        environment: Mapping[str, str],
        *,
        uncut: Callable[[], tuple[int, ...]],
        cut: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._settings = settings
        self._environment = dict(environment)
        self._uncut = uncut
        self._cut = cut
        self._lock = threading.Lock()
        self._segments: dict[int, OwnedSegment] = {}
        self._lent: dict[int, EngineSegment] = {}
        self._facts = _NO_FACTS
        self._has_started = threading.Event()
        self._failure = ""
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kv-lender", daemon=True)
        self.lives_count = 0
        self.pid = 0

    @property
    def facts(self) -> LenderFacts:
        """What the process said of itself; known once this has started."""
        return self._facts

    def start(self, segments: Mapping[int, OwnedSegment]) -> None:
        """Lend the segments that there are; blocks until they are lent.

        Raises:
            NoWayError: nothing can be lent here, and why.
        """
        self._segments.update(segments)
        self._thread.start()
        self._has_started.wait()  # Which ends: every step of the thread has its own limit.
        if self._failure:
            self.stop()
            raise NoWayError(self._failure)

    def stop(self) -> None:
        """Lend nothing any more. Idempotent."""
        with self._lock:
            if self._wake < 0:
                return
            self._stopping.set()
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def add(self, number: int, segment: OwnedSegment) -> None:
        """Lend one more; it is there some time after."""
        with self._lock:
            self._segments[number] = segment
        self.look_again()

    def drop(self, number: int) -> None:
        """Lend one no more; its descriptor may be closed from now on."""
        with self._lock:
            self._segments.pop(number, None)
            self._lent.pop(number, None)
        self.look_again()

    def look_again(self) -> None:
        """See to what has changed: segments, or writers that are to be cut off."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def segments(self, numbers: Sequence[int]) -> tuple[EngineSegment, ...]:
        """Return where segments are now, and the ways there.

        Raises:
            NoWayError: not all of them are lent at this moment.
        """
        with self._lock:
            missing = [number for number in numbers if number not in self._lent]
            if missing:
                raise NoWayError(
                    f"segments {missing[:8]} of the arena are not lent at this moment: use another transport"
                )
            return tuple(self._lent[number] for number in numbers)

    # ---- the thread

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception:  # noqa: BLE001 # border: task
            _log.exception("the arena is lent no more: its supervisor failed")
            self._failure = "its supervisor failed; the log says more"
        finally:
            self._forget()
            self._has_started.set()

    def _supervise(self) -> None:
        pause_s = BACKOFF_FIRST_S
        while not self._stopping.is_set():
            begun_s = time.monotonic()
            reason, how = self._live_once()
            lived_s = time.monotonic() - begun_s
            self._forget()
            self._tell_cut()
            if self._stopping.is_set():
                return
            if not self._has_started.is_set():
                self._failure = reason
                return
            if not reason:
                continue  # It was ended for a writer's sake, and is wanted again at once.
            if lived_s > HEALTHY_S:
                pause_s = BACKOFF_FIRST_S
            _log.error(
                "the process that lends the arena ended after %.1f s with %s (%s): the next starts in %.1f s",
                lived_s,
                how,
                reason,
                pause_s,
            )
            self._pause(pause_s)
            pause_s = min(pause_s * BACKOFF_FACTOR, BACKOFF_LIMIT_S)

    def _live_once(self) -> tuple[str, str]:
        """Run one process to its end; return why it ended ("" if that was our wish), and how."""
        try:
            lender = LenderProcess(self._settings, self._environment)
        except OSError as error:
            return f"it cannot be started: {error}", "nothing"
        reason = PEER_TO_BLAME
        try:
            facts = lender.facts()
            with self._lock:
                self._facts = facts
                self.lives_count += 1
                self.pid = lender.pid
            reason = self._attend(lender)
        except (KvError, OSError) as error:
            reason = str(error)
        finally:
            if self._stopping.is_set():
                lender.end()
            how = lender.kill()
        return reason, how

    def _attend(self, lender: LenderProcess) -> str:
        """Keep it lending what there is; return why not any more ("" if that is our wish)."""
        sent: set[int] = set()
        while not self._stopping.is_set():
            self._send_changes(lender, sent)
            self._has_started.set()
            if not lender.watch(self._wake):
                return PEER_TO_BLAME
            self._drain_wake()
            waiting = () if self._stopping.is_set() else self._uncut()
            if waiting:
                _log.warning("%d failed writes are cut off: the arena is lent anew", len(waiting))
                return ""
        return ""

    def _send_changes(self, lender: LenderProcess, sent: set[int]) -> None:
        with self._lock:
            fresh, gone = self._segments.keys() - sent, sent - self._segments.keys()
        for number in sorted(gone):
            lender.drop(number)
            sent.discard(number)
        for number in sorted(fresh):
            with self._lock:
                segment = self._segments.get(number)
                if segment is None:
                    continue
                # Ours, since the segment's own may be closed as soon as the lock is free.
                descriptor, size_bytes = os.dup(segment.fd), segment.size_bytes
            try:
                lent = lender.add(number, descriptor, size_bytes)
            except NoWayError as error:
                _log.warning("segment %d of the arena is not lent: %s", number, error)
            else:
                with self._lock:
                    if number in self._segments:
                        self._lent[number] = lent
            finally:
                os.close(descriptor)
            sent.add(number)

    def _forget(self) -> None:
        with self._lock:
            self._lent.clear()
            self.pid = 0

    def _tell_cut(self) -> None:
        """Say which writes have been cut off: those that waited for it while no process lends anything."""
        waiting = self._uncut()
        if waiting:
            self._cut(waiting)

    def _pause(self, pause_s: float) -> None:
        """Let time pass; what is to be cut off meanwhile, is already."""
        end_s = time.monotonic() + pause_s
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._stopping.is_set() and (left_s := end_s - time.monotonic()) > 0:
            if poll.poll(left_s * 1000):
                self._drain_wake()
                self._tell_cut()

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return


class LentArena(Arena):
    """An arena that tells its lender of segments that come and go."""

    lender: UcxArena | None = None

    def create_segment(self) -> int:
        """See Arena."""
        number = super().create_segment()
        if self.lender is not None:
            self.lender.add(number, self.segment(number))
        return number

    def discard_segment(self, segment: int) -> None:
        """See Arena."""
        if self.lender is not None:
            self.lender.drop(segment)
        super().discard_segment(segment)
