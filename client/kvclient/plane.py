"""The way to the bytes, as one session has it."""

from __future__ import annotations

from dataclasses import dataclass

from kvclient.local_memory import LocalMemory
from kvclient.results import Attachment
from kvclient.touch_ahead import TouchAhead
from kvservice.core.errors import PeerUnavailableError
from kvservice.ports.transport import Transport
from kvservice.transports.registry import TransportContext, builtin_registry


@dataclass(frozen=True, slots=True)
class Plane:
    """Transport and memory of one session; replaced as a whole with the session.

    Numbers of slots, segments and spaces mean something in one life of the daemon only,
    so whoever uses them takes the plane once and holds its epoch or incarnation to
    theirs: the next life gives the same numbers to other blocks.
    """

    epoch: int
    daemon_incarnation: bytes
    wire: Transport | None
    memory: LocalMemory | None

    @property
    def transport(self) -> Transport:
        """The transport. Raises PeerUnavailableError where the daemon offers none."""
        if self.wire is None:
            raise PeerUnavailableError(
                "the daemon has no tcp data plane; start it with one, or use its Unix socket on this host"
            )
        return self.wire

    def close(self) -> None:
        """Let go of connections and mappings; copies under way end first. Idempotent."""
        if self.memory is not None:
            self.memory.close()
        if self.wire is not None:
            self.wire.close()


def plane_of(attachment: Attachment, *, is_local: bool, touch_ahead: TouchAhead) -> Plane:
    """Return the plane of a session that has just begun."""
    memory: LocalMemory | None = None
    wire: Transport | None = None
    if is_local:
        memory = LocalMemory(touch_ahead)
        wire = memory.transport
    elif attachment.tcp_address:
        token = attachment.session_token
        context = TransportContext(session_token=lambda: token)
        wire = builtin_registry().make(f"tcp://{attachment.tcp_address}", context)
    return Plane(attachment.epoch, attachment.daemon_incarnation, wire, memory)
