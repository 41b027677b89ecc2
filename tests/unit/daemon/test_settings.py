"""The values of settings: what each may be, and what a wrong one is told."""

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.daemon.config import ConfigError, default_segment_bytes
from kvservice.daemon.settings import (
    SECTIONS,
    ArenaSettings,
    LeaseSettings,
    Settings,
    TenantSettings,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
TOKEN = hashlib.sha256(b"secret").hexdigest()


VALID = [
    ("server.grpc_listen", "", ""),
    ("server.grpc_listen", "0.0.0.0:0", "0.0.0.0:0"),
    ("server.tcp_listen", "[::1]:65535", "[::1]:65535"),
    ("server.tcp_listen", "kv-1.example:7401", "kv-1.example:7401"),
    ("server.socket_path", "x" * 107, "x" * 107),
    ("server.drain_timeout_ms", 0, 0),
    ("server.drain_timeout_ms", 600000, 600000),
    ("server.log_level", "warning", "warning"),
    ("server.log_format", "json", "json"),
    ("arena.touch_ahead", False, False),
    ("lease.heartbeat_timeout_ms", 3001, 3001),
    ("lease.max_ttl_ms", 10000, 10000),
    ("lease.renew_interval_ms", 9999, 9999),
    ("limits.max_batch_keys", 65536, 65536),
    ("limits.max_sessions", 1, 1),
    ("security.server_key_file", "/etc/key", "/etc/key"),
    ("ucx.enabled", "on", "on"),
    ("ucx.devices", "mlx5_0:1;mlx5_1:1", "mlx5_0:1;mlx5_1:1"),
    ("ucx.transports", "x" * 1024, "x" * 1024),
    ("tenants.default.quota_bytes", "3GiB", 3 * GIB),
    ("tenants.default.token_sha256", TOKEN.upper(), TOKEN),
    ("tenants.default.uids", [0, 1000], (0, 1000)),
    ("tenants.default.uids", [], ()),
]

WRONG = [
    ("server.grpc_listen", 7400, "it is not a text"),
    ("server.grpc_listen", "localhost", "does not end in a port"),
    ("server.grpc_listen", "localhost:65536", "does not end in a port"),
    ("server.grpc_listen", "localhost:-1", "does not end in a port"),
    ("server.grpc_listen", "localhost:٣", "does not end in a port"),
    ("server.grpc_listen", ":7400", "the host is missing"),
    ("server.tcp_listen", "a b:7400", "malformed"),
    ("server.tcp_listen", "::1:7400", "in brackets, as in [::1]:7400"),
    ("server.tcp_listen", "[localhost]:7400", "allowed is host:port"),
    ("server.socket_path", "x" * 108, "it has 108 bytes; allowed is a path of at most 107 bytes"),
    ("server.socket_path", "é" * 54, "it has 108 bytes"),
    ("server.socket_path", "a\0b", "NUL"),
    ("server.drain_timeout_ms", -1, "out of range; allowed is 0..600000"),
    ("server.drain_timeout_ms", 600001, "out of range; allowed is 0..600000"),
    ("server.drain_timeout_ms", 1.0, "not a whole number"),
    ("server.drain_timeout_ms", True, "not a whole number"),
    ("server.drain_timeout_ms", "5000", "not a whole number"),
    ("server.log_level", "INFO", "allowed is debug, info, warning, error"),
    ("server.log_format", "xml", "allowed is text, json"),
    ("arena.capacity_bytes", MIB - 1, "allowed is 1MiB..16TiB"),
    ("arena.capacity_bytes", 2**44 + 1, "allowed is 1MiB..16TiB"),
    ("arena.capacity_bytes", "1GB", "the unit 'GB' is unknown"),
    ("arena.capacity_bytes", "-1GiB", "a whole number with or without a unit"),
    ("arena.capacity_bytes", "9000000TiB", "more than"),
    ("arena.capacity_bytes", 2.5, "not a whole number"),
    ("arena.segment_bytes", 3 * MIB, "it is not a power of two"),
    ("arena.segment_bytes", 32 * KIB, "allowed is a power of two, 64KiB..2GiB"),
    ("arena.segment_bytes", "4GiB", "allowed is a power of two, 64KiB..2GiB"),
    ("arena.segment_bytes", "2GiB", "allowed is at most arena.capacity_bytes = 1073741824"),
    ("arena.touch_ahead", 1, "it is not a boolean; allowed is true or false"),
    ("arena.touch_ahead", "true", "it is not a boolean"),
    ("lease.ttl_ms", 99, "allowed is 100..600000"),
    ("lease.ttl_ms", 600001, "allowed is 100..600000"),
    ("lease.renew_interval_ms", 0, "allowed is 1..599999"),
    ("lease.renew_interval_ms", 10000, "allowed is less than lease.ttl_ms = 10000"),
    ("lease.heartbeat_timeout_ms", 3000, "allowed is more than lease.renew_interval_ms = 3000"),
    ("lease.max_ttl_ms", 9999, "allowed is at least lease.ttl_ms = 10000"),
    ("limits.max_batch_keys", 0, "allowed is 1..65536"),
    ("limits.max_batch_keys", 65537, "allowed is 1..65536"),
    ("limits.max_sessions", 0, "allowed is 1..65536"),
    ("limits.max_reservations_per_session", 0, "allowed is 1..1048576"),
    ("limits.max_leases_per_session", 2**20 + 1, "allowed is 1..1048576"),
    ("limits.event_history", 0, "allowed is 1..16777216"),
    ("limits.max_tcp_connections", 0, "allowed is 1..65536"),
    ("security.server_key_file", 1, "it is not a text"),
    ("ucx.enabled", "yes", "allowed is off, on"),
    ("ucx.library", "a\nb", "cannot be printed"),
    ("ucx.devices", "x" * 1025, "allowed is printable text of at most 1024 characters"),
    ("tenants.default.quota_bytes", -1, "out of range"),
    ("tenants.default.token_sha256", "secret", "it is not 64 hex digits"),
    ("tenants.default.uids", 1000, "it is not an array"),
    ("tenants.default.uids", [-1], "out of range"),
    ("tenants.default.uids", [2**32 - 1], "allowed is at most 1024 different ids, each 0..4294967294"),
    ("tenants.default.uids", [True], "not a whole number"),
    ("tenants.default.uids", [5, 5], "an entry stands twice"),
    ("tenants.default.uids", list(range(1025)), "too many"),
]


def build(key, value):
    """Build the section of a key with that one setting, and return the setting as it then is."""
    table, _, name = key.rpartition(".")
    section = SECTIONS[table.replace("default", "NAME")](**{name: value})
    return getattr(section, name)


def refused(run, *args, **kwargs):
    """Return the message of the ConfigError."""
    with pytest.raises(ConfigError) as caught:
        run(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(("key", "value", "expected"), VALID)
def test_a_value_in_its_range_is_taken(key, value, expected):
    """Bounds are inclusive; a value that can be written in several ways has one form."""
    assert build(key, value) == expected


@pytest.mark.parametrize(("key", "value", "problem"), WRONG)
def test_a_wrong_value_names_the_key_and_the_range(key, value, problem):
    """The message has the key, what is wrong and what is allowed."""
    message = refused(build, key, value)
    assert message.startswith(f"{key} = ")
    assert problem in message
    assert "allowed is " in message


def test_settings_are_frozen():
    """What was checked stays as it was."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        LeaseSettings().ttl_ms = 1


def test_a_token_is_never_shown():
    """Settings end up in logs, and who writes the token where its digest belongs does not find it there."""
    assert "hunter2" not in refused(build, "tenants.default.token_sha256", "hunter2")
    assert TOKEN not in repr(TenantSettings(name="acme", token_sha256=TOKEN))


@given(st.integers(MIB, 2**44))
def test_every_capacity_has_a_segment_size(capacity_bytes):
    """The size worked out is a power of two in range, at least four fit, and rounding loses less than one."""
    segment_bytes = default_segment_bytes(capacity_bytes)
    arena = ArenaSettings(capacity_bytes=capacity_bytes, segment_bytes=segment_bytes)
    assert segment_bytes.bit_count() == 1
    assert 64 * KIB <= segment_bytes <= 256 * MIB
    assert arena.segments_count >= 4
    assert 0 <= capacity_bytes - arena.capacity_bytes < segment_bytes


def test_tenants_are_checked_together():
    """Settings built by hand have default once, each name once, and a bounded number."""
    assert "default" in refused(Settings, tenants=())
    assert "each name once" in refused(Settings, tenants=(TenantSettings(), TenantSettings()))
    many = [TenantSettings(name=f"t{n}", token_sha256=f"{n:064x}") for n in range(1024)]
    assert refused(Settings, tenants=(TenantSettings(), *many)).startswith(
        "1025 tenants: allowed is at most 1024"
    )
