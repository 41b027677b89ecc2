"""The settings of the daemon as frozen values that check themselves.

Each field carries its rule and its meaning, so that a key, its check and its
documentation are one line. `kvservice.daemon.config` fills them.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from kvservice.daemon import units
from kvservice.daemon.units import Rule

T = TypeVar("T")

KIB, MIB, GIB = 2**10, 2**20, 2**30

MAX_MESSAGE_CHARACTERS = 1000
"""A message is one line of a log, whatever stands in the file."""

MAX_SEGMENTS = 65536
"""Each is a file descriptor or two; this is 16 TiB in segments of the default size."""

MIN_SERVER_KEY_BYTES = 16
MAX_SERVER_KEY_BYTES = 4096

DEFAULT_TENANT = "default"
MAX_TENANTS = 1024
"""Each has segments of its own lent to it; more than that share nothing any more."""

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 200

_TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)


class ConfigError(Exception):
    """A setting is wrong. The message is one line; `keys` are the settings concerned."""

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(" ".join(message.splitlines())[:MAX_MESSAGE_CHARACTERS])
        self.keys = keys


def _setting(default: T, rule: Rule, meaning: str) -> T:
    return field(default=default, metadata=_about(rule, meaning))


def _about(rule: Rule, meaning: str) -> dict[str, object]:
    return {"rule": rule, "meaning": meaning}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where the daemon listens, and how it stops and logs. `load` fills an empty `socket_path`."""

    grpc_listen: str = _setting("127.0.0.1:7400", units.addresses(), "address of the gRPC control plane")
    socket_path: str = _setting(
        "",
        units.paths(units.MAX_SOCKET_PATH_BYTES),
        "Unix socket of the local lane; empty: $XDG_RUNTIME_DIR/kvservice.sock, "
        "else /tmp/kvservice-<uid>/kvservice.sock",
    )
    tcp_listen: str = _setting("127.0.0.1:7401", units.addresses(), "address of the tcp data plane")
    drain_timeout_ms: int = _setting(5000, units.integers(0, 600_000), "how long a stop waits for transfers")
    log_level: str = _setting(
        "info", units.choices("debug", "info", "warning", "error"), "least level logged"
    )
    log_format: str = _setting("text", units.choices("text", "json"), "for people, or for collectors")

    def __post_init__(self) -> None:
        """Check every field."""
        _check(self, "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSettings:
    """The memory that blocks live in. `capacity_bytes` is rounded down to whole segments."""

    capacity_bytes: int = _setting(GIB, units.sizes(MIB, 2**44), "size of the arena")
    segment_bytes: int = _setting(
        256 * MIB,
        units.powers_of_two(64 * KIB, 2 * GIB),
        "size of a segment, at most the capacity and at least a block; "
        "default for an arena below 1GiB: the largest power of two in a quarter of it",
    )
    touch_ahead: bool = _setting(True, units.switches(), "touch pages before a writer has to wait for them")

    def __post_init__(self) -> None:
        """Check every field, and round."""
        _check(self, "arena")
        if self.segment_bytes > self.capacity_bytes:
            _refuse(self, "arena", "segment_bytes", "capacity_bytes", "at most")
        if self.segments_count > MAX_SEGMENTS:
            message = f"arena.segment_bytes = {self.segment_bytes}: that makes {self.segments_count} segments"
            raise ConfigError(
                f"{message}; allowed is at most {MAX_SEGMENTS}", "arena.segment_bytes", "arena.capacity_bytes"
            )
        object.__setattr__(self, "capacity_bytes", self.segments_count * self.segment_bytes)

    @property
    def segments_count(self) -> int:
        """Return the number of segments, at least 1."""
        return self.capacity_bytes // self.segment_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """How long rights last and how often they are renewed."""

    ttl_ms: int = _setting(10_000, units.integers(100, 600_000), "life of a lease that asks for none")
    renew_interval_ms: int = _setting(
        3000, units.integers(1, 599_999), "how often clients renew; less than ttl_ms"
    )
    heartbeat_timeout_ms: int = _setting(
        10_000, units.integers(2, 600_000), "silence that ends a remote session; more than renew_interval_ms"
    )
    max_ttl_ms: int = _setting(
        60_000, units.integers(100, 86_400_000), "longest life that may be asked for; at least ttl_ms"
    )
    handoff_hold_ms: int = _setting(
        120_000, units.integers(100, 86_400_000), "longest life of a handoff, however often it is renewed"
    )
    operation_bound_ms: int = _setting(
        5000, units.integers(1, 600_000), "longest that one read of another engine's memory may take"
    )

    def __post_init__(self) -> None:
        """Check every field by itself and against the others."""
        _check(self, "lease")
        if self.renew_interval_ms >= self.ttl_ms:
            _refuse(self, "lease", "renew_interval_ms", "ttl_ms", "less than")
        if self.heartbeat_timeout_ms <= self.renew_interval_ms:
            _refuse(self, "lease", "heartbeat_timeout_ms", "renew_interval_ms", "more than")
        if self.max_ttl_ms < self.ttl_ms:
            _refuse(self, "lease", "max_ttl_ms", "ttl_ms", "at least")
        if self.handoff_hold_ms < self.ttl_ms:
            _refuse(self, "lease", "handoff_hold_ms", "ttl_ms", "at least")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSettings:
    """How much of everything."""

    max_batch_keys: int = _setting(16_384, units.integers(1, 65_536), "keys in one request")
    max_sessions: int = _setting(1024, units.integers(1, 65_536), "sessions at once")
    max_reservations_per_session: int = _setting(
        4096, units.integers(1, 2**20), "open reservations of a session"
    )
    max_leases_per_session: int = _setting(16_384, units.integers(1, 2**20), "leases of a session")
    max_handoffs_per_session: int = _setting(
        4096, units.integers(1, 2**20), "handoffs that a session has on offer at once"
    )
    max_segments_per_session: int = _setting(
        1024, units.integers(1, 2**16), "segments, and layouts in them, that a session lends"
    )
    event_history: int = _setting(65_536, units.integers(1, 2**24), "events kept for watchers that come back")
    max_tcp_connections: int = _setting(256, units.integers(1, 65_536), "connections of the tcp data plane")

    def __post_init__(self) -> None:
        """Check every field."""
        _check(self, "limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """What namespaces are derived with; `read_server_key` reads the file."""

    server_key_file: str = _setting(
        "",
        units.paths(4095),
        f"file of {MIN_SERVER_KEY_BYTES} to {MAX_SERVER_KEY_BYTES} secret bytes, from which namespaces are "
        "derived; empty: random in each life of the daemon",
    )

    def __post_init__(self) -> None:
        """Check every field."""
        _check(self, "security")


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxSettings:
    """Whether the arena is lent over UCX. It is for trusted networks: a key protects none of it."""

    enabled: str = _setting(
        "off", units.choices("off", "on"), "lend the arena over UCX, out of a process of its own"
    )
    library: str = _setting(
        "auto", units.names(), "which UCX: auto, wheel (the package), system, or the path of libucp.so.0"
    )
    transports: str = _setting("", units.names(), "what UCX may use, as UCX_TLS takes it; empty: its choice")
    devices: str = _setting(
        "",
        units.names(),
        "network devices, as UCX_NET_DEVICES takes them; lists separated by ; are lanes; empty: its choice",
    )

    def __post_init__(self) -> None:
        """Check every field."""
        _check(self, "ucx")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """One tenant: who it is and how much it may hold."""

    name: str = DEFAULT_TENANT
    quota_bytes: int = _setting(0, units.sizes(0, 2**44), "most bytes of its blocks; 0: the whole arena")
    token_sha256: str = field(
        default="",
        repr=False,  # a settings object ends up in logs
        metadata=_about(
            units.sha256_digests(), 'digest of its bearer token; only the tenant "default" may have none'
        ),
    )
    uids: tuple[int, ...] = _setting((), units.user_ids(), "users of this host that are this tenant")

    def __post_init__(self) -> None:
        """Check every field."""
        check_tenant_name(self.name)
        table = f"tenants.{self.name}"
        _check(self, table)
        if not self.token_sha256 and self.name != DEFAULT_TENANT:
            key = f"{table}.token_sha256"
            raise ConfigError(f'{key} is missing: only the tenant "{DEFAULT_TENANT}" needs no token', key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything. `tenants` has `default` first, then the others by name."""

    server: ServerSettings = field(default_factory=ServerSettings)
    arena: ArenaSettings = field(default_factory=ArenaSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    limits: LimitsSettings = field(default_factory=LimitsSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    ucx: UcxSettings = field(default_factory=UcxSettings)
    tenants: tuple[TenantSettings, ...] = field(default_factory=lambda: (TenantSettings(),))

    def __post_init__(self) -> None:
        """Check that names and credentials name one tenant each."""
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names) or DEFAULT_TENANT not in names:
            raise ConfigError(f'tenants {names}: allowed is each name once, "{DEFAULT_TENANT}" among them')
        if len(names) > MAX_TENANTS:
            raise ConfigError(f"{len(names)} tenants: allowed is at most {MAX_TENANTS}")
        owners: dict[object, str] = {}
        for tenant in self.tenants:
            for uid in tenant.uids:
                _claim(owners, uid, tenant.name, "uids")
            if tenant.token_sha256:
                _claim(owners, tenant.token_sha256, tenant.name, "token_sha256")

    def tenant(self, name: str) -> TenantSettings | None:
        """Return the tenant of that name, None if there is none."""
        return next((tenant for tenant in self.tenants if tenant.name == name), None)


def read(
    key: str, read_value: Callable[[Any], object], value: object, *, allowed: str, origin: str = ""
) -> object:
    """Apply a rule's `read` or `read_text`; raises ConfigError with key, value, origin and range."""
    try:
        return read_value(value)
    except ValueError as error:
        # What is wrong with a token's digest is often that it is the token itself.
        shown = "(hidden)" if key.endswith("token_sha256") else show(value)
        raise ConfigError(f"{key} = {shown}{origin}: {error}; allowed is {allowed}", key) from None


def check_tenant_name(name: str, origin: str = "") -> None:
    """Check a tenant's name, which is part of keys, of variables, and of what people see."""
    if not _TENANT_NAME.fullmatch(name):
        raise ConfigError(
            f"tenant name {show(name)}{origin}: allowed is 1..64 small letters, digits, - and _, "
            "the first a letter or digit"
        )


def show(value: object) -> str:
    """Write a value for a message, shortened."""
    try:
        return _BRIEF.repr(value)
    except ValueError:
        return "(a huge number)"  # Python refuses to print more than 4300 digits


def settings_of(section: type[Any], table: str) -> Iterator[tuple[str, Rule, Field[Any]]]:
    """Yield key, rule and field of each setting of a section."""
    for setting in fields(section):
        if "rule" in setting.metadata:
            yield f"{table}.{setting.name}", setting.metadata["rule"], setting


def _check(section: Any, table: str) -> None:
    """Check every field of a section by its rule, and bring it into its one form."""
    for key, rule, setting in settings_of(type(section), table):
        value = read(key, rule.read, getattr(section, setting.name), allowed=rule.allowed)
        object.__setattr__(section, setting.name, value)


def _refuse(section: Any, table: str, name: str, other: str, relation: str) -> NoReturn:
    """Say that `name` contradicts `other`, with both values: either may be the wrong one."""
    key, other_key = f"{table}.{name}", f"{table}.{other}"
    raise ConfigError(
        f"{key} = {getattr(section, name)}: allowed is {relation} {other_key} = {getattr(section, other)}",
        key,
        other_key,
    )


def _claim(owners: dict[object, str], credential: object, tenant: str, name: str) -> None:
    """Record that a credential names `tenant`, and refuse one that names another already."""
    owner = owners.setdefault((name, credential), tenant)
    if owner != tenant:
        keys = (f"tenants.{owner}.{name}", f"tenants.{tenant}.{name}")
        raise ConfigError(f"{keys[0]} and {keys[1]} share an entry: allowed is one tenant for each", *keys)


SECTIONS: dict[str, type[Any]] = {
    "server": ServerSettings,
    "arena": ArenaSettings,
    "lease": LeaseSettings,
    "limits": LimitsSettings,
    "security": SecuritySettings,
    "ucx": UcxSettings,
    "tenants.NAME": TenantSettings,
}
"""The table of each section."""
