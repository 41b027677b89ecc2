"""The way to the bytes, as one session has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvclient.config import TCP, ClientSettings
from kvclient.fallback import FallbackTransport
from kvclient.local_memory import LocalMemory
from kvclient.one_sided import LazyOneSided
from kvclient.results import Attachment
from kvclient.touch_ahead import TouchAhead
from kvservice.core.errors import PeerUnavailableError
from kvservice.ports.transport import Transport
from kvservice.transports.rdma import rdma_devices
from kvservice.transports.registry import TransportContext, builtin_registry

if TYPE_CHECKING:
    from kvclient.remote_authority import BlockingCall


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


def plane_of(
    attachment: Attachment,
    settings: ClientSettings,
    *,
    touch_ahead: TouchAhead,
    one_sided: LazyOneSided,
    call: BlockingCall,
) -> Plane:
    """Return the plane of a session that has just begun. call: of that session."""
    memory: LocalMemory | None = None
    wire: Transport | None = None
    if settings.lane_path:
        memory = LocalMemory(touch_ahead)
        wire = memory.transport
    else:
        if attachment.tcp_address:
            token = attachment.session_token
            context = TransportContext(session_token=lambda: token)
            wire = builtin_registry().make(f"tcp://{attachment.tcp_address}", context)
        wire = _faster(wire, settings, one_sided, call)
    return Plane(attachment.epoch, attachment.daemon_incarnation, wire, memory)


def _faster(
    wire: Transport | None, settings: ClientSettings, one_sided: LazyOneSided, call: BlockingCall
) -> Transport | None:
    """Return a transport that reads one-sidedly where that is wanted, and otherwise as `wire` does.

    Over tcp alone one-sided reads are slower than sockets, so unless they are asked for by name they are
    for hosts with RDMA devices; nothing is loaded, and nobody asked, where there are none.
    """
    wish, name = settings.arena_transport, settings.one_sided.transport
    is_asked_for = bool(wish) and wish != TCP
    if not is_asked_for and (wish == TCP or not rdma_devices() or not one_sided.transports()):
        return wire
    from kvclient.remote_authority import DaemonAuthority, reaches_by_rdma  # noqa: PLC0415 - see above
    from kvservice.transports.ucx.arena_transport import UcxTransport  # noqa: PLC0415

    reader = UcxTransport(DaemonAuthority(call), one_sided.endpoint)
    return FallbackTransport(reader, wire, lambda: is_asked_for or reaches_by_rdma(call, name))
