"""The process that lends the daemon's arena: `python -m kvservice.transports.ucx.arena_child FD SETTINGS...`.

An rkey protects nothing, and a bad address over tcp crashes whoever it reaches. So UCX runs here and not in
the daemon, and this process has nothing that a peer may not see: the memory of segments, which the daemon
hands over as descriptors, and neither pages of generations nor a directory nor a secret. The daemon starts
another one when this one dies; see `kvservice.engine.ucx_arena`.

SETTINGS are the texts of an `EndpointSettings`: transport, library, transports, devices.
"""

from __future__ import annotations

import os
import socket
import sys

from kvservice.core.engine_memory import EngineSegment, MemoryKind
from kvservice.core.errors import KvError, NoWayError
from kvservice.native import ucx
from kvservice.ports.one_sided import LentMemory, OneSided
from kvservice.transports.one_sided import EndpointSettings, make_endpoint
from kvservice.transports.rdma import usable_devices
from kvservice.transports.segment_messages import segment_message
from kvservice.transports.segments import Mapping
from kvservice.transports.ucx.arena_frames import (
    LenderFacts,
    Packet,
    PacketKind,
    receive,
    send,
)

CANNOT_LEND = 3
"""Exit status where there is no endpoint; its last packet says why."""


class Lender:
    """Maps what it is handed, lends it, and says where it is."""

    def __init__(self, wire: socket.socket, endpoint: OneSided) -> None:
        self._wire = wire
        self._endpoint = endpoint
        self._lent: dict[int, tuple[Mapping, LentMemory]] = {}

    def serve(self) -> None:
        """Answer requests until the daemon's end of the socket closes."""
        while (received := receive(self._wire)) is not None:
            request, descriptors = received
            try:
                answer = self._answer(request, descriptors)
            except KvError as error:
                answer = Packet(PacketKind.FAILED, request.number, body=error.message.encode())
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            send(self._wire, answer)
            tell_log()

    def close(self) -> None:
        """Lend nothing any more."""
        for number in list(self._lent):
            self._drop(number)
        self._endpoint.close()

    def _answer(self, request: Packet, descriptors: list[int]) -> Packet:
        number = request.number
        if request.kind is PacketKind.ADD and len(descriptors) == 1:
            segment = self._add(number, descriptors[0], request.size_bytes)
            return Packet(PacketKind.ADDED, number, body=segment_message(segment).SerializeToString())
        if request.kind is PacketKind.DROP:
            self._drop(number)
            return Packet(PacketKind.DROPPED, number)
        raise NoWayError(f"a {request.kind.name} with {len(descriptors)} descriptors is no request")

    def _add(self, number: int, descriptor: int, size_bytes: int) -> EngineSegment:
        mapping = Mapping(descriptor, size_bytes, is_writable=True)
        try:
            lent = self._endpoint.lend(mapping.address, size_bytes, MemoryKind.HOST)
        except KvError:
            mapping.close()
            raise
        self._drop(number)
        self._lent[number] = (mapping, lent)
        return EngineSegment(mapping.address, size_bytes, MemoryKind.HOST, lent.ways)

    def _drop(self, number: int) -> None:
        entry = self._lent.pop(number, None)
        if entry is not None:
            mapping, lent = entry
            lent.close()
            mapping.close()


def tell_log() -> None:
    """Write what UCX has had to say; the daemon takes it into its log."""
    for line in ucx.drain_log():
        sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Lend until the socket ends; return the exit status."""
    descriptor, transport, library, transports, devices = arguments
    with socket.socket(fileno=int(descriptor)) as wire:
        settings = EndpointSettings(transport, library, transports, devices, by_messages=True)
        try:
            endpoint = make_endpoint(settings)
            if endpoint is None:
                raise NoWayError("the settings name no transport")
        except KvError as error:
            send(wire, Packet(PacketKind.FAILED, body=error.message.encode()))
            return CANNOT_LEND
        lender = Lender(wire, endpoint)
        try:
            facts = LenderFacts(endpoint.transport, usable_devices(devices))
            send(wire, Packet(PacketKind.READY, body=facts.encode()))
            tell_log()
            lender.serve()
        except (BrokenPipeError, ConnectionResetError):
            return 0  # The daemon is gone.
        finally:
            lender.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
