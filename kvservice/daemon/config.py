"""Where the daemon's settings come from: defaults, a TOML file, the environment, flags.

The last of these that gives a setting wins; every value that is given is checked, also
one that is overridden. A key is `table.name`, in the environment
`KVSERVICE_TABLE__NAME`. This is the only module of the service that reads the
environment and files of settings.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvservice.daemon import units
from kvservice.daemon.settings import (
    DEFAULT_TENANT,
    KIB,
    MAX_SERVER_KEY_BYTES,
    MIB,
    MIN_SERVER_KEY_BYTES,
    SECTIONS,
    ArenaSettings,
    ConfigError,
    LeaseSettings,
    LimitsSettings,
    SecuritySettings,
    ServerSettings,
    Settings,
    TenantSettings,
    UcxSettings,
    check_tenant_name,
    read,
    settings_of,
    show,
)
from kvservice.daemon.units import Rule

__all__ = [
    "ArenaSettings",
    "ConfigError",
    "LeaseSettings",
    "LimitsSettings",
    "SecuritySettings",
    "ServerSettings",
    "SettingDescription",
    "Settings",
    "TenantSettings",
    "UcxSettings",
    "default_segment_bytes",
    "describe",
    "lender_environment",
    "load",
    "read_server_key",
]

T = TypeVar("T")

ENV_PREFIX = "KVSERVICE_"

CLIENT_VARIABLES = frozenset({"KVSERVICE_ENDPOINT"})
"""Read by `kvclient.config`; a shell that has them set must be able to start a daemon."""

MAX_CONFIG_BYTES = MIB
"""A larger file holds no settings; without a bound a device file would never end."""

RANDOM_SERVER_KEY_BYTES = 32

UCX_PREFIX = "UCX_"
LENDER_VARIABLES = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "HOME", "TMPDIR", "LANG", "LC_ALL", "TZ"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "VIRTUAL_ENV"),
        "CUDA_VISIBLE_DEVICES",
    }
)
"""What the process that lends the arena gets of the environment, beside UCX's own variables. Every peer
can read its memory, so it is told what it needs to run, and no secret of anybody's."""

# Kubernetes puts these into every pod beside a Service whose name begins with "kvservice". They are not ours
# and not typing errors: the names have no "__", and a port is a URL where a setting never is.
_KUBERNETES_NAME = re.compile(
    r"KVSERVICE_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_KUBERNETES_PORT = re.compile(r"KVSERVICE_([A-Z0-9_]+_)?PORT=(tcp|udp|sctp)://.*")


class SettingDescription(NamedTuple):
    """One key in words, for `kvservice check-config` and the README."""

    key: str
    type: str
    default: str
    meaning: str
    allowed: str


@dataclass(frozen=True, slots=True)
class _Given:
    """A value that somebody gave, and where, as words that end a message."""

    value: object
    origin: str


def load(
    config_path: str | Path | None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Settings:
    """Read, merge and check all settings; the arena and the socket path are worked out.

    `config_path` None means no file, `environ` None the environment of this process,
    and `flags` are texts by key, as in {"server.grpc_listen": "127.0.0.1:0"}.
    Raises ConfigError, with the key, the value, where it stands, and what is allowed.
    """
    environ = os.environ if environ is None else environ
    given = dict(_from_file(Path(config_path))) if config_path is not None else {}
    given.update(_from_environment(environ))
    given.update(_from_flags(flags or {}))
    if not _value(given, "server.socket_path", ""):
        given["server.socket_path"] = _default_socket_path(environ)
    if "arena.segment_bytes" not in given:
        capacity_bytes = _value(given, "arena.capacity_bytes", ArenaSettings().capacity_bytes)
        segment_bytes = default_segment_bytes(capacity_bytes)
        given["arena.segment_bytes"] = _Given(segment_bytes, " (default for that capacity)")
    names = {key.split(".")[1] for key in given if key.startswith("tenants.")} - {DEFAULT_TENANT}
    return Settings(
        server=_section(ServerSettings, "server", given),
        arena=_section(ArenaSettings, "arena", given),
        lease=_section(LeaseSettings, "lease", given),
        limits=_section(LimitsSettings, "limits", given),
        security=_section(SecuritySettings, "security", given),
        ucx=_section(UcxSettings, "ucx", given),
        tenants=tuple(
            _section(partial(TenantSettings, name=name), f"tenants.{name}", given)
            for name in (DEFAULT_TENANT, *sorted(names))
        ),
    )


def describe() -> list[SettingDescription]:
    """Describe every key in the order of the file; NAME stands for the name of any tenant."""
    return [
        SettingDescription(
            key, rule.type_name, _toml(rule, setting.default), setting.metadata["meaning"], rule.allowed
        )
        for table, section in SECTIONS.items()
        for key, rule, setting in settings_of(section, table)
    ]


def lender_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of the process that lends the arena. `environ` None: out of this process's."""
    environ = os.environ if environ is None else environ
    return {
        name: value
        for name, value in environ.items()
        if name in LENDER_VARIABLES or name.startswith(UCX_PREFIX)
    }


def default_segment_bytes(capacity_bytes: int) -> int:
    """Return 256 MiB, or what makes at least four segments of a smaller arena: a power of two."""
    quarter_bytes = max(capacity_bytes // 4, 64 * KIB)
    return int(min(256 * MIB, 1 << (quarter_bytes.bit_length() - 1)))


def read_server_key(security: SecuritySettings) -> bytes:
    """Return the key of the file, every byte of it; without a file a random one."""
    if not security.server_key_file:
        return os.urandom(RANDOM_SERVER_KEY_BYTES)
    what = f"security.server_key_file = {security.server_key_file!r}"
    key = _read_file(Path(security.server_key_file), MAX_SERVER_KEY_BYTES, what)
    if len(key) < MIN_SERVER_KEY_BYTES:
        raise ConfigError(
            f"{what}: it holds {len(key)} bytes; allowed is {MIN_SERVER_KEY_BYTES}..{MAX_SERVER_KEY_BYTES}",
            "security.server_key_file",
        )
    return key


def _read_file(path: Path, max_bytes: int, what: str) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise ConfigError(f"{what}: it cannot be read: {error}") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{what}: it holds more than {max_bytes} bytes")
    return content


def _from_file(path: Path) -> Iterator[tuple[str, _Given]]:
    content = _read_file(path, MAX_CONFIG_BYTES, f"file {path}")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also for numbers and nesting that Python refuses
        raise ConfigError(f"file {path} is not TOML: {error}") from error
    origin = f" (in {path})"
    for key, value in _flatten(document, origin):
        rule = _rule(key, origin)
        yield key, _Given(read(key, rule.read, value, allowed=rule.allowed, origin=origin), origin)


def _flatten(document: dict[str, object], origin: str) -> Iterator[tuple[str, object]]:
    """Yield keys and values; a tenant's empty table makes a tenant all the same."""
    tables = {name for name in SECTIONS if "." not in name}
    for table, content in document.items():
        if table not in tables | {"tenants"}:
            raise _unknown(f"table {show(table)}", origin, table, sorted(tables | {"tenants"}))
        values = _table(table, content, origin)
        if table != "tenants":
            yield from ((f"{table}.{name}", value) for name, value in values.items())
            continue
        for tenant, settings in values.items():
            check_tenant_name(tenant, origin)
            for name, value in (_table(f"tenants.{tenant}", settings, origin) or {"quota_bytes": 0}).items():
                yield f"tenants.{tenant}.{name}", value


def _table(key: str, value: object, origin: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key} = {show(value)}{origin}: allowed is a table, [{key}]", key)
    return value


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    for variable in sorted(environ):
        text = environ[variable]
        if variable in CLIENT_VARIABLES:
            continue
        is_foreign = _KUBERNETES_NAME.fullmatch(variable) or _KUBERNETES_PORT.fullmatch(f"{variable}={text}")
        if not variable.startswith(ENV_PREFIX) or is_foreign:
            continue
        key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        origin = f" (in the environment, {variable})"
        rule = _rule(key, " (in the environment)", spell=_variable, spelled=variable)
        yield key, _Given(read(key, rule.read_text, text, allowed=rule.allowed, origin=origin), origin)


def _from_flags(flags: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    for key, text in flags.items():
        origin = " (in a flag)"
        rule = _rule(key, origin)
        yield key, _Given(read(key, rule.read_text, text, allowed=rule.allowed, origin=origin), origin)


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def _rule(key: str, origin: str, *, spell: Callable[[str], str] = str, spelled: str | None = None) -> Rule:
    """Find the rule of a key; an unknown one is an error that names the closest, as its user spells keys."""
    spelled = key if spelled is None else spelled
    known = _rules()
    pattern, tenant = key, "NAME"
    if key.startswith("tenants.") and key.count(".") > 1:
        tenant, _, name = key.removeprefix("tenants.").rpartition(".")
        check_tenant_name(tenant, origin)
        pattern = f"tenants.NAME.{name}"
    # Spelling it again finds variables that only look alike, such as kvservice in small letters.
    if pattern not in known or spell(key) != spelled:
        raise _unknown(
            f"key {show(spelled)}",
            origin,
            spell(key),
            [spell(candidate.replace("NAME", tenant)) for candidate in known],
        )
    return known[pattern]


def _rules() -> dict[str, Rule]:
    """Return the rule of each key that `describe` describes."""
    return {key: rule for table, section in SECTIONS.items() for key, rule, _ in settings_of(section, table)}


def _toml(rule: Rule, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f'"{units.format_size(value)}"' if rule.type_name == "size" and value else str(value)
    return "[]" if value == () else f'"{value}"'


def _unknown(what: str, origin: str, spelled: str, candidates: list[str]) -> ConfigError:
    # Cut, since comparing takes time that grows with the length.
    closest = difflib.get_close_matches(spelled[:200], candidates, n=1, cutoff=0.0)[0]
    return ConfigError(f"unknown {what}{origin}: the closest one known is {closest}")


def _section(make: Callable[..., T], table: str, given: Mapping[str, _Given]) -> T:
    """Build one section of what was given of it; an error says where each value concerned stands."""
    prefix = f"{table}."
    values = {key.removeprefix(prefix): entry.value for key, entry in given.items() if key.startswith(prefix)}
    try:
        return make(**values)
    except ConfigError as error:
        origins = [f"{key}{given[key].origin if key in given else ' (default)'}" for key in error.keys]
        raise ConfigError(f"{error} [{', '.join(origins)}]", *error.keys) from None


def _value(given: Mapping[str, _Given], key: str, default: T) -> T:
    """Return what was given for a key whose rule makes it of the type of `default`."""
    value = given[key].value if key in given else default
    return value if isinstance(value, type(default)) else default


def _default_socket_path(environ: Mapping[str, str]) -> _Given:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if Path(runtime).is_absolute():  # the specification says to ignore a relative one
        return _Given(f"{runtime.rstrip('/')}/kvservice.sock", " (from XDG_RUNTIME_DIR)")
    return _Given(f"/tmp/kvservice-{os.getuid()}/kvservice.sock", " (default)")  # noqa: S108 - the user's own folder
