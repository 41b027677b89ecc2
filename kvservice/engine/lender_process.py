"""One life of the process that lends the arena: started, asked, listened to, ended."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from kvservice.core.engine_memory import EngineSegment
from kvservice.core.errors import DeadlineError, NoWayError, PeerUnavailableError
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx.arena_frames import (
    LenderFacts,
    Packet,
    PacketKind,
    parse_segment,
    receive,
    send,
)

_log = logging.getLogger(__name__)

CHILD_MODULE = "kvservice.transports.ucx.arena_child"

START_LIMIT_S = 30.0
"""Importing NumPy and opening UCX takes half a second on an idle host."""

ANSWER_LIMIT_S = 30.0
"""Registering a segment for RDMA has its pages made: a third of a second for each GiB."""

END_LIMIT_S = 5.0
OUTPUT_BYTES = 4096
"""Of what the process writes, in one line of the log."""


class LenderProcess:
    """Used by one thread. Whoever made it calls `kill` in the end."""

    def __init__(self, settings: EndpointSettings, environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        self._wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._wire.settimeout(ANSWER_LIMIT_S)
        texts = (settings.transport, settings.library, settings.transports, settings.devices)
        try:
            # Signals of a terminal are for the daemon, which ends it. Its words go into our log, UCX's
            # too, which would write to stdout.
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD_MODULE, str(theirs.fileno()), *texts],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            self._wire.close()
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(output)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def facts(self) -> LenderFacts:
        """Wait until it lends, and return what it says of itself.

        Raises:
            NoWayError: it cannot, and why.
            PeerUnavailableError, DeadlineError: it said nothing.
        """
        answer = self._hear(time.monotonic() + START_LIMIT_S)
        if answer.kind is PacketKind.FAILED:
            raise NoWayError(answer.body.decode(errors="replace"))
        return LenderFacts.parse(answer.body)

    def add(self, number: int, descriptor: int, size_bytes: int) -> EngineSegment:
        """Have it lend a segment; return where it is, and the ways there.

        Raises:
            NoWayError: it cannot lend this one, and lives on.
            PeerUnavailableError, DeadlineError, MalformedError: it is of no use any more.
        """
        answer = self._ask(Packet(PacketKind.ADD, number, size_bytes), descriptor)
        if answer.kind is PacketKind.FAILED:
            raise NoWayError(answer.body.decode(errors="replace"))
        return parse_segment(answer.body)

    def drop(self, number: int) -> None:
        """Have it lend a segment no more. Raises as `add`."""
        self._ask(Packet(PacketKind.DROP, number))

    def watch(self, wake_fd: int) -> bool:
        """Wait until `wake_fd` can be read; False when the process ended instead."""
        while True:
            ready = self._poll([wake_fd], None)
            if self._wire.fileno() in ready:
                return False  # It says nothing that it was not asked for, so this is its end.
            if wake_fd in ready:
                return True

    def kill(self) -> str:
        """End it now, and wait until it is gone; return how it ended. Idempotent."""
        with self._wire:
            self._process.kill()  # Changes nothing where it has come to its end.
            status = self._process.wait()
        if self._output >= 0:
            self._log_output()
            os.close(self._output)
            self._output = -1
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"

    def end(self) -> None:
        """Have it end in order, or else at once."""
        self._wire.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.kill()

    def _ask(self, request: Packet, descriptor: int = -1) -> Packet:
        deadline_s = time.monotonic() + ANSWER_LIMIT_S
        try:
            send(self._wire, request, descriptor)
        except OSError as error:
            raise PeerUnavailableError(f"the lender of the arena is gone: {error}") from error
        answer = self._hear(deadline_s)
        if answer.number != request.number:
            raise PeerUnavailableError(
                f"the lender answered for segment {answer.number}, not {request.number}"
            )
        return answer

    def _hear(self, deadline_s: float) -> Packet:
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError("the lender of the arena did not answer in time")
            if self._wire.fileno() in self._poll([], left_s):
                break
        try:
            received = receive(self._wire)
        except OSError as error:
            raise PeerUnavailableError(f"the lender of the arena is gone: {error}") from error
        if received is None:
            raise PeerUnavailableError("the lender of the arena ended")
        packet, descriptors = received
        for descriptor in descriptors:
            os.close(descriptor)
        return packet

    def _poll(self, more: list[int], limit_s: float | None) -> set[int]:
        """Wait for the socket, or one of `more`; what it writes meanwhile goes into the log."""
        poll = select.poll()
        for descriptor in (self._wire.fileno(), self._output, *more):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(None if limit_s is None else limit_s * 1000)}
        if self._output in ready and not self._log_output():
            os.close(self._output)
            self._output = -1
        return ready

    def _log_output(self) -> bool:
        """Log what it has written; False at the end of it."""
        try:
            written = os.read(self._output, OUTPUT_BYTES)
        except BlockingIOError:
            return True
        for line in written.decode(errors="replace").splitlines():
            _log.warning("the lender of the arena says: %s", line, extra={"pid": self.pid})
        return bool(written)
