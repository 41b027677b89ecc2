"""The other edge of the fake daemon: its calls over gRPC, its bytes over tcp."""

from __future__ import annotations

import itertools
from concurrent import futures
from typing import Any, Self

import grpc
import numpy as np

from kvclient._backends.grpc_calls import PATHS
from kvservice.core.errors import KvError, LeaseUnknownError, ReservationUnknownError
from kvservice.core.slots import GRANULE_BYTES
from kvservice.ports.methods import Method
from kvservice.ports.transport import Grant
from kvservice.transports.frames import encode_error, status_of
from kvservice.transports.tcp.server import TcpServer
from tests.unit.kvclient.fake_daemon import REQUESTS, FakeDaemon

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class FakeGrpc:
    """`with FakeGrpc(daemon) as edge:` serves the daemon at `edge.endpoint`."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self._tcp = TcpServer("127.0.0.1:0", FakeAuthority(daemon))
        self.metadata: list[dict[str, Any]] = []
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._daemon.tcp_address = self._tcp.start()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        services: dict[str, dict[str, Any]] = {}
        for method, path in PATHS.items():
            _, service, rpc = path.split("/")
            services.setdefault(service, {})[rpc] = self._handler(method)
        for service, handlers in services.items():
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"grpc://127.0.0.1:{port}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._tcp.stop()

    def _handler(self, method: Method) -> grpc.RpcMethodHandler:
        def answer(request: Any, context: Any) -> Any:
            metadata = dict(context.invocation_metadata())
            self.metadata.append(metadata)
            if not self._daemon.note(method, request):
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            try:
                return self._daemon.handle(method, request, metadata.get("kv-session-bin", b""))
            except KvError as error:
                context.set_trailing_metadata((("grpc-status-details-bin", encode_error(error)),))
                context.abort(_CODES[status_of(error).code], error.message)

        def stream(request: Any, context: Any) -> Any:
            yield answer(request, context)

        kind = grpc.unary_unary_rpc_method_handler
        if method == Method.WATCH_EVENTS:
            return grpc.unary_stream_rpc_method_handler(stream, REQUESTS[method].FromString, _serialize)
        return kind(answer, REQUESTS[method].FromString, _serialize)


class FakeAuthority:
    """Lets whoever names a reservation or lease of the fake daemon touch its slots."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self._ids = itertools.count(1)

    def begin_write(self, *, session_token: bytes, reservation_id: int, slot_indexes: Any) -> Grant:
        """Grant the slots of a reservation."""
        life = self._daemon.life
        if reservation_id not in life.reservations:
            raise ReservationUnknownError(f"no reservation {reservation_id}")
        places = life.reservations[reservation_id]["places"]
        chosen = [places[index] for index in slot_indexes]
        return self._grant([(granule, life.spaces[space]) for _, space, granule in chosen], None)

    def begin_read(self, *, session_token: bytes, lease_id: int, slot_indexes: Any) -> Grant:
        """Grant the slots of a lease."""
        if lease_id not in self._daemon.life.leases:
            raise LeaseUnknownError(f"no lease {lease_id}")
        places = [self._daemon.life.leases[lease_id][index] for index in slot_indexes]
        sums = np.array([checksum for _, _, checksum in places], np.uint32)
        return self._grant([(granule, length) for granule, length, _ in places], sums)

    def end(self, transfer_id: int, *, checksums: Any) -> None:
        """Keep nothing."""

    def _grant(self, places: list[tuple[int, int]], sums: Any) -> Grant:
        base = self._daemon.life.segment.address
        addresses = np.array([base + granule * GRANULE_BYTES for granule, _ in places], np.uint64)
        return Grant(next(self._ids), addresses, np.array([length for _, length in places], np.uint64), sums)


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()
