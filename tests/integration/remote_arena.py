"""What the tests of the lent arena share: a transport that cannot fall back, and a look at the lender."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvclient import ClientSettings
from kvclient._backends.grpc_sync import GrpcConnection
from kvclient.remote_authority import DaemonAuthority
from kvclient.sync import KvClient
from kvservice.core.slots import Slots
from kvservice.ports.transport import Pieces, Transfer
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx import UcxEndpoint
from kvservice.transports.ucx.arena_transport import UcxTransport
from tests.integration.daemon_process import BLOCK_BYTES, DaemonProcess

CALL_S = 5.0
HERE = EndpointSettings(devices="lo")
OVER_TCP = EndpointSettings(transports="tcp", devices="lo")


def config(settings: EndpointSettings = HERE, more: str = "") -> str:
    """Return the file of a daemon that lends its arena."""
    lines = ('enabled = "on"', f'transports = "{settings.transports}"', f'devices = "{settings.devices}"')
    return "\n".join((more, "[ucx]", *lines, ""))


@contextlib.contextmanager
def authority_of(client: KvClient, grpc: str) -> Iterator[DaemonAuthority]:
    """The calls about transfers in a client's session, over a gRPC connection of their own."""
    connection = GrpcConnection(ClientSettings(grpc))
    connection.bind(client.attachment.session_token)
    try:
        yield DaemonAuthority(
            lambda method, request, response_type: connection.call(method, request, response_type, CALL_S)
        )
    finally:
        connection.close()


@contextlib.contextmanager
def reaching(
    client: KvClient, grpc: str, settings: EndpointSettings = HERE
) -> Iterator[tuple[UcxTransport, DaemonAuthority, UcxEndpoint]]:
    """A transport in a client's session that reads and writes one-sidedly, or fails."""
    endpoint = UcxEndpoint(settings)
    try:
        with authority_of(client, grpc) as authority:
            yield UcxTransport(authority, lambda: endpoint, endpoint.write), authority, endpoint
    finally:
        endpoint.close()


def transfer(
    capability_id: int, slots: Slots, memory: np.ndarray, *, timeout_s: float = 10.0, is_summed: bool = True
) -> Transfer:
    """Return the transfer of all slots of a capability to or from (blocks, bytes) of memory."""
    count = len(slots)
    lengths = np.full(count, BLOCK_BYTES, np.uint64)
    addresses = np.uint64(memory.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    sums = np.zeros(count, np.uint32) if is_summed else None
    return Transfer(
        capability_id, slots, np.arange(count), lengths, Pieces(addresses, lengths), sums, timeout_s
    )


def lender_pids(daemon: DaemonProcess) -> list[int]:
    """Return the children of a daemon, dead ones that nobody has waited for left out."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == daemon.pid and state != "Z":
                found.append(int(entry.name))
    return found


def lender_pid(daemon: DaemonProcess) -> int:
    """Return the process that lends the arena of a daemon."""
    (pid,) = lender_pids(daemon)
    return pid
