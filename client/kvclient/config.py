"""Settings of a client; the only place of the client that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvservice.core.errors import InvalidFieldError
from kvservice.transports.one_sided import EndpointSettings

ENDPOINT_VARIABLE = "KVSERVICE_ENDPOINT"
LANE_SCHEME = "unix:"
GRPC_SCHEME = "grpc://"

INCARNATION_BYTES = 16
CLIENT_NAME_CHARACTERS_MAX = 128
TIMEOUT_S_MAX = 3600.0

TCP = "tcp"
"""The transport that every daemon of another host has."""


def default_endpoint() -> str:
    """Return $KVSERVICE_ENDPOINT, else the daemon's default socket of this user."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE)
    if endpoint:
        return endpoint
    runtime_directory = os.environ.get("XDG_RUNTIME_DIR")
    if runtime_directory:
        return f"{LANE_SCHEME}{runtime_directory}/kvservice.sock"
    # The daemon makes the folder, for its user alone, and refuses one that is not its own.
    return f"{LANE_SCHEME}/tmp/kvservice-{os.getuid()}/kvservice.sock"  # noqa: S108


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a client reaches its daemon, and how long it waits.

    endpoint: "unix:/path" for a daemon on this host (calls over the Unix socket,
        bytes over shared memory) or "grpc://host:port" (calls over gRPC, bytes
        over tcp). The default is `default_endpoint()`.
    call_timeout_s: deadline of one control call.
    transfer_timeout_s: deadline of moving the bytes of one batch.
    connect_timeout_s: deadline of reaching the daemon and opening the session.
    client_name: what operators see in `kvservice status`.
    engine_incarnation: 16 bytes; all processes of one engine give the same, a
        restarted engine gives another.
    token: bearer token that names the tenant; empty where the daemon asks for none.
    verify: check the CRC32C of what `get` reads.
    checksums: send the CRC32C of what `put` writes; without it `verify` finds
        nothing to check these blocks against.
    one_sided: how this process lends memory to other engines and reads theirs; nothing
        of it is loaded before the first handoff.
    arena_transport: how blocks are read out of the arena of a daemon that is reached over gRPC: the name
        of the one-sided transport ("ucx"), "tcp", or "" for one-sided reads where both hosts have RDMA
        devices, and tcp elsewhere. A one-sided transport that fails gives way to tcp.

    Raises:
        InvalidFieldError: a value is out of its range.
    """

    endpoint: str = field(default_factory=default_endpoint)
    call_timeout_s: float = 2.0
    transfer_timeout_s: float = 30.0
    connect_timeout_s: float = 5.0
    client_name: str = "kvclient"
    engine_incarnation: bytes = field(default_factory=lambda: os.urandom(INCARNATION_BYTES))
    token: str = field(default="", repr=False)
    verify: bool = True
    checksums: bool = True
    one_sided: EndpointSettings = field(default_factory=EndpointSettings)
    arena_transport: str = ""

    def __post_init__(self) -> None:
        for name in ("call_timeout_s", "transfer_timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if not 0 < value <= TIMEOUT_S_MAX:
                raise InvalidFieldError(f"{name} is {value}; give seconds above 0, up to {TIMEOUT_S_MAX:.0f}")
        if len(self.engine_incarnation) != INCARNATION_BYTES:
            raise InvalidFieldError(
                f"engine_incarnation has {len(self.engine_incarnation)} bytes; give {INCARNATION_BYTES}, "
                "the same for all processes of one engine"
            )
        if len(self.client_name) > CLIENT_NAME_CHARACTERS_MAX:
            raise InvalidFieldError(
                f"client_name has {len(self.client_name)} characters; "
                f"give {CLIENT_NAME_CHARACTERS_MAX} at most"
            )
        if self.arena_transport not in {"", TCP, self.one_sided.transport}:
            raise InvalidFieldError(
                f"arena_transport is {self.arena_transport!r}; give {TCP!r}, the name of "
                f"one_sided.transport ({self.one_sided.transport!r}), or nothing to leave it to the client"
            )
        if not (self.lane_path or self._has_grpc_port()):
            raise InvalidFieldError(
                f"endpoint is {self.endpoint!r}; give unix:/path/of/the.sock or grpc://host:port "
                f"(${ENDPOINT_VARIABLE} sets the default)"
            )

    @property
    def lane_path(self) -> str:
        """Path of the Unix socket; empty if the endpoint is a gRPC one."""
        if not self.endpoint.startswith(LANE_SCHEME):
            return ""
        return self.endpoint.removeprefix(LANE_SCHEME)

    @property
    def grpc_target(self) -> str:
        """`host:port` of the gRPC server; empty if the endpoint is a local one."""
        return "" if self.lane_path else self.endpoint.removeprefix(GRPC_SCHEME)

    def _has_grpc_port(self) -> bool:
        if not self.endpoint.startswith(GRPC_SCHEME):
            return False
        host, _, port = self.endpoint.removeprefix(GRPC_SCHEME).rpartition(":")
        return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16
