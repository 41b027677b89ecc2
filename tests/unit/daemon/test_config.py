"""Where settings come from, which source wins, and what a wrong one is told."""

import dataclasses
import hashlib
import os
import pathlib
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvservice.daemon import units
from kvservice.daemon.config import (
    ArenaSettings,
    ConfigError,
    LeaseSettings,
    LimitsSettings,
    SecuritySettings,
    ServerSettings,
    Settings,
    TenantSettings,
    UcxSettings,
    describe,
    load,
    read_server_key,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
TOKEN = hashlib.sha256(b"secret").hexdigest()
OTHER_TOKEN = hashlib.sha256(b"other").hexdigest()


@pytest.fixture
def load_text(tmp_path):
    """Return a function that loads the text of a file, with no environment but what is given."""

    def run(text, environ=None, flags=None):
        path = tmp_path / "kv.toml"
        path.write_text(text, encoding="utf-8")
        return load(path, environ or {}, flags or {})

    return run


def refused(run, *args, **kwargs):
    """Return the message of the ConfigError, which is always one line of bounded length."""
    with pytest.raises(ConfigError) as caught:
        run(*args, **kwargs)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) <= 1000
    return message


def test_the_defaults_are_those_that_are_documented():
    """Nothing given is a working daemon on the loopback."""
    found = load(None, {}, {})
    assert found.server == ServerSettings(
        grpc_listen="127.0.0.1:7400",
        socket_path=f"/tmp/kvservice-{os.getuid()}/kvservice.sock",
        tcp_listen="127.0.0.1:7401",
        drain_timeout_ms=5000,
        log_level="info",
        log_format="text",
    )
    assert found.arena == ArenaSettings(capacity_bytes=GIB, segment_bytes=256 * MIB, touch_ahead=True)
    assert found.lease == LeaseSettings(
        ttl_ms=10000, renew_interval_ms=3000, heartbeat_timeout_ms=10000, max_ttl_ms=60000
    )
    assert found.limits == LimitsSettings(
        max_batch_keys=16384,
        max_sessions=1024,
        max_reservations_per_session=4096,
        max_leases_per_session=16384,
        event_history=65536,
        max_tcp_connections=256,
    )
    assert found.security == SecuritySettings(server_key_file="")
    assert found.ucx == UcxSettings(enabled="off", library="auto", transports="", devices="")
    assert found.tenants == (TenantSettings(name="default", quota_bytes=0, token_sha256="", uids=()),)


def test_flags_win_over_the_environment_over_the_file_over_the_default(load_text):
    """Each source overrides the ones before it, key by key."""
    text = "[limits]\nmax_sessions = 2\nevent_history = 2\nmax_batch_keys = 2"
    environ = {"KVSERVICE_LIMITS__MAX_SESSIONS": "3", "KVSERVICE_LIMITS__EVENT_HISTORY": "3"}
    found = load_text(text, environ, {"limits.max_sessions": "4"}).limits
    assert (found.max_sessions, found.event_history, found.max_batch_keys) == (4, 3, 2)
    assert found.max_tcp_connections == 256


def test_a_wrong_value_is_refused_even_where_it_is_overridden(load_text):
    """A broken file is mended, not hidden by a flag until the day the flag goes."""
    message = refused(load_text, "[limits]\nmax_sessions = 0", None, {"limits.max_sessions": "4"})
    assert message.startswith("limits.max_sessions = 0 (in ")


def test_without_an_environ_the_environment_of_the_process_counts(monkeypatch):
    """The command line need not read the environment, which is allowed here alone."""
    monkeypatch.setenv("KVSERVICE_SERVER__LOG_LEVEL", "debug")
    assert load(None).server.log_level == "debug"


def test_the_file_that_we_ship_as_example_is_valid():
    """deploy/examples/kvservice.toml loads, and gives the defaults."""
    path = pathlib.Path(__file__).resolve().parents[3] / "deploy" / "examples" / "kvservice.toml"
    assert load(path, {}, {}) == load(None, {}, {})


def setting(found, key):
    """Return the setting of a key."""
    table, *tenant, name = key.split(".")
    section = found.tenant(tenant[0]) if tenant else getattr(found, table)
    return getattr(section, name)


@pytest.mark.parametrize("source", ["environ", "flags"])
@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("server.drain_timeout_ms", "7", 7),
        ("arena.capacity_bytes", "2GiB", 2 * GIB),
        ("arena.capacity_bytes", "2097152", 2 * MIB),
        ("arena.segment_bytes", "1MiB", MIB),
        ("arena.touch_ahead", "false", False),
        ("server.grpc_listen", "", ""),
        ("tenants.default.uids", "1000, 1001", (1000, 1001)),
        ("tenants.default.uids", "", ()),
    ],
)
def test_variables_and_flags_are_texts(source, key, text, expected):
    """A text is read by the rule of its key, since neither a variable nor a flag has types."""
    name = "KVSERVICE_" + key.upper().replace(".", "__") if source == "environ" else key
    given_texts = {"environ": {}, "flags": {}} | {source: {name: text}}
    assert setting(load(None, **given_texts), key) == expected


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("server.drain_timeout_ms", "1e3"),
        ("server.drain_timeout_ms", "1_000"),
        ("server.drain_timeout_ms", ""),
        ("server.drain_timeout_ms", "-1"),
        ("server.drain_timeout_ms", "9" * 5000),
        ("arena.touch_ahead", "yes"),
        ("arena.touch_ahead", "True"),
        ("arena.capacity_bytes", ""),
        ("tenants.default.uids", "1000,"),
        ("tenants.default.uids", "root"),
    ],
)
def test_a_wrong_text_names_the_variable_or_the_flag(key, text):
    """Whoever set it must find it: the message says where it came from."""
    variable = "KVSERVICE_" + key.upper().replace(".", "__")
    message = refused(load, None, {variable: text}, {})
    assert message.startswith(f"{key} = ")
    assert f"(in the environment, {variable})" in message
    message = refused(load, None, {}, {key: text})
    assert message.startswith(f"{key} = ")
    assert "(in a flag)" in message


@pytest.mark.parametrize(
    ("text", "key", "closest"),
    [
        ("[server]\ngrpc_listn = ''", "'server.grpc_listn'", "server.grpc_listen"),
        ("[server]\n'grpc.listen' = ''", "'server.grpc.listen'", "server.grpc_listen"),
        ("[severs]\ngrpc_listen = ''", "'severs'", "server"),
        ("capacity_bytes = 5", "'capacity_bytes'", "security"),
        ("[limits]\nmax_session = 5", "'limits.max_session'", "limits.max_sessions"),
        ("[server.tls]\ncert = ''", "'server.tls'", "server."),
        ("[tenants.acme]\nquota = 5", "'tenants.acme.quota'", "tenants.acme.quota_bytes"),
        ("[tenants.acme]\nname = 'x'", "'tenants.acme.name'", "tenants.acme."),
        ("['tenants.NAME']\nquota_bytes = 5", "'tenants.NAME'", "tenants"),
    ],
)
def test_an_unknown_key_in_the_file_is_an_error_that_names_the_closest(
    load_text, tmp_path, text, key, closest
):
    """A misspelt key would otherwise be a setting that silently does nothing."""
    message = refused(load_text, text)
    assert message.startswith("unknown ")
    assert f"{key} (in {tmp_path / 'kv.toml'})" in message
    assert f"the closest one known is {closest}" in message


@pytest.mark.parametrize(
    ("variable", "closest"),
    [
        ("KVSERVICE_SERVER__GRPC_LISTN", "KVSERVICE_SERVER__GRPC_LISTEN"),
        ("KVSERVICE_SERVER_GRPC_LISTEN", "KVSERVICE_SERVER__GRPC_LISTEN"),
        ("KVSERVICE_SERVER.GRPC_LISTEN", "KVSERVICE_SERVER__GRPC_LISTEN"),
        ("KVSERVICE_server__grpc_listen", "KVSERVICE_SERVER__GRPC_LISTEN"),
        ("KVSERVICE_TENANTS__ACME__QUOTA", "KVSERVICE_TENANTS__ACME__QUOTA_BYTES"),
        ("KVSERVICE_PORT", "KVSERVICE_"),
        ("KVSERVICE_", "KVSERVICE_"),
        ("KVSERVICE_" + "X" * 100_000, "KVSERVICE_"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_closest(variable, closest):
    """Variables are checked like keys, and are spelt in the message as they are in a shell."""
    message = refused(load, None, {variable: "5"}, {})
    assert message.startswith("unknown key 'KVSERVICE_")
    assert f"the closest one known is {closest}" in message


def test_a_wrong_value_in_the_file_names_the_file(load_text, tmp_path):
    """Whoever wrote it must find it; a contradiction counts as one."""
    path = tmp_path / "kv.toml"
    message = refused(load_text, "[limits]\nmax_sessions = 0")
    assert message == f"limits.max_sessions = 0 (in {path}): it is out of range; allowed is 1..65536"
    message = refused(load_text, "[arena]\nsegment_bytes = '2GiB'")
    assert message.endswith(f"[arena.segment_bytes (in {path}), arena.capacity_bytes (default)]")


def test_an_unknown_flag_is_an_error_that_names_the_closest():
    """Flags are checked like keys."""
    message = refused(load, None, {}, {"arena.capacity": "5"})
    assert (
        message == "unknown key 'arena.capacity' (in a flag): the closest one known is arena.capacity_bytes"
    )


def test_variables_of_others_are_not_ours():
    """Only the prefix is ours, and not even all of it in a pod: a Service named kvservice sets these."""
    environ = {
        "PATH": "/bin",
        "KVCLIENT_ADDRESS": "x",
        "KVSERVICE_SERVICE_HOST": "10.0.0.1",
        "KVSERVICE_SERVICE_PORT": "7400",
        "KVSERVICE_SERVICE_PORT_GRPC": "7400",
        "KVSERVICE_PORT": "tcp://10.0.0.1:7400",
        "KVSERVICE_PORT_7400_TCP": "tcp://10.0.0.1:7400",
        "KVSERVICE_PORT_7400_TCP_ADDR": "10.0.0.1",
        "KVSERVICE_METRICS_SERVICE_HOST": "10.0.0.1",
    }
    assert load(None, environ, {}) == load(None, {}, {})


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/7/"}, "/run/user/7/kvservice.sock"),
        ({"XDG_RUNTIME_DIR": "run"}, f"/tmp/kvservice-{os.getuid()}/kvservice.sock"),
        ({"XDG_RUNTIME_DIR": "/run", "KVSERVICE_SERVER__SOCKET_PATH": "/a"}, "/a"),
        ({"XDG_RUNTIME_DIR": "/run", "KVSERVICE_SERVER__SOCKET_PATH": ""}, "/run/kvservice.sock"),
    ],
)
def test_the_socket_lies_in_the_runtime_folder(environ, path):
    """Without a path of its own the socket is where the system keeps a user's sockets."""
    assert load(None, environ, {}).server.socket_path == path


def test_a_runtime_folder_that_is_too_long_says_which_setting_helps():
    """The path was not given by the user, so the message names key and origin."""
    message = refused(load, None, {"XDG_RUNTIME_DIR": "/" + "x" * 100}, {})
    assert message.startswith("server.socket_path = ")
    assert "server.socket_path (from XDG_RUNTIME_DIR)" in message


@pytest.mark.parametrize(
    ("capacity_bytes", "segment_bytes", "rounded_bytes"),
    [
        (GIB, 256 * MIB, GIB),
        (GIB + 1, 256 * MIB, GIB),
        (5 * GIB, 256 * MIB, 5 * GIB),
        (GIB - 1, 128 * MIB, 896 * MIB),
        (100 * MIB, 16 * MIB, 96 * MIB),
        (MIB, 256 * KIB, MIB),
        (2**44, 256 * MIB, 2**44),
    ],
)
def test_a_small_arena_has_small_segments(capacity_bytes, segment_bytes, rounded_bytes):
    """Unless told otherwise an arena has at least four segments, to be lent to several tenants."""
    arena = load(None, {}, {"arena.capacity_bytes": str(capacity_bytes)}).arena
    assert (arena.segment_bytes, arena.capacity_bytes) == (segment_bytes, rounded_bytes)
    assert arena.segments_count == rounded_bytes // segment_bytes


def test_a_segment_size_that_is_given_is_kept():
    """The rule for small arenas is only for who does not say; one segment is enough."""
    flags = {"arena.capacity_bytes": "100MiB", "arena.segment_bytes": "64MiB"}
    arena = load(None, {}, flags).arena
    assert (arena.segment_bytes, arena.capacity_bytes, arena.segments_count) == (64 * MIB, 64 * MIB, 1)


def test_segments_are_bounded():
    """Each segment costs descriptors, so a large arena needs large ones."""
    flags = {"arena.capacity_bytes": "8GiB", "arena.segment_bytes": "64KiB"}
    assert "131072 segments; allowed is at most 65536" in refused(load, None, {}, flags)


def test_settings_that_contradict_each_other_are_both_placed(load_text):
    """Either may be the wrong one: both keys, both values, and where each stands."""
    message = refused(load_text, "[lease]\nttl_ms = 2000")
    assert message.startswith("lease.renew_interval_ms = 3000: allowed is less than lease.ttl_ms = 2000")
    assert "lease.renew_interval_ms (default), lease.ttl_ms (in " in message


def test_a_tenant_has_its_own_table(load_text):
    """Tenants come from every source and are merged key by key; default is there and first."""
    text = f"[tenants.acme]\nquota_bytes = '1GiB'\ntoken_sha256 = '{TOKEN}'\nuids = [1000]\n"
    environ = {"KVSERVICE_TENANTS__ACME__UIDS": "5", "KVSERVICE_TENANTS__A-1__TOKEN_SHA256": OTHER_TOKEN}
    found = load_text(text, environ, {"tenants.default.quota_bytes": "2GiB"})
    assert found.tenants == (
        TenantSettings(quota_bytes=2 * GIB),
        TenantSettings(name="a-1", token_sha256=OTHER_TOKEN),
        TenantSettings(name="acme", quota_bytes=GIB, token_sha256=TOKEN, uids=(5,)),
    )
    assert found.tenant("acme") == found.tenants[2]
    assert found.tenant("nobody") is None


@pytest.mark.parametrize("text", ["[tenants.acme]\n", "[tenants.acme]\nquota_bytes = 5\nuids = [7]\n"])
def test_a_tenant_needs_a_token(load_text, text):
    """Without one anybody would be that tenant; only default may be anybody's."""
    assert refused(load_text, text).startswith("tenants.acme.token_sha256 is missing: only the tenant")


@pytest.mark.parametrize("name", ["Acme", "a.b", "", "-a", "a b", "x" * 65, "é", "a\\u001bb"])
def test_a_tenant_name_is_a_plain_word(load_text, name):
    """Names stand in keys, variables and tables for people."""
    message = refused(load_text, f'[tenants."{name}"]\nquota_bytes = 5\n')
    assert message.startswith("tenant name ")
    assert "allowed is 1..64 small letters" in message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("acme", "other", "name"),
    [
        (f"token_sha256 = '{TOKEN}'", f"token_sha256 = '{TOKEN.upper()}'", "token_sha256"),
        (
            f"token_sha256 = '{TOKEN}'\nuids = [1, 2]",
            f"token_sha256 = '{OTHER_TOKEN}'\nuids = [2, 3]",
            "uids",
        ),
    ],
)
def test_a_credential_names_one_tenant(load_text, acme, other, name):
    """A token or user of two tenants would be one of them by chance."""
    message = refused(load_text, f"[tenants.acme]\n{acme}\n[tenants.other]\n{other}\n")
    assert message.startswith(f"tenants.acme.{name} and tenants.other.{name} share an entry")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[server", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"x = " + b"9" * 5000, "is not TOML"),
        (b"x = " + b"[" * 100_000, "is not TOML"),
        (b"[limits]\nmax_sessions = 0x" + b"f" * 20_000, "a huge number"),
        (b"server = 0x" + b"f" * 20_000, "a huge number"),
        (b"server = 5", "server = 5"),
        (b"[[server]]\n", "allowed is a table, [server]"),
        (b"tenants = 5", "allowed is a table, [tenants]"),
        (b"[tenants]\nacme = 5", "allowed is a table, [tenants.acme]"),
        (b"#" * (MIB + 1), "it holds more than 1048576 bytes"),
        (b'"a\\nb" = 5', "unknown table 'a\\nb'"),
    ],
)
def test_a_file_that_is_not_settings_is_refused_in_one_line(tmp_path, content, problem):
    """Whatever the file holds, the daemon says so and ends; it does not crash."""
    path = tmp_path / "kv.toml"
    path.write_bytes(content)
    message = refused(load, path, {}, {})
    assert problem in message
    assert str(path) in message


@pytest.mark.parametrize("name", ["missing.toml", ".", "a\0b", "two\nlines"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    """A file that was asked for and is not there is an error, not a default."""
    assert "it cannot be read" in refused(load, tmp_path / name, {}, {})


def test_the_server_key_is_every_byte_of_its_file(tmp_path):
    """The same file gives the same namespaces after a restart; without one each life has its own."""
    path = tmp_path / "key"
    for size in (16, 4096):
        path.write_bytes(b"k" * (size - 1) + b"\n")
        assert read_server_key(SecuritySettings(server_key_file=str(path))) == b"k" * (size - 1) + b"\n"
    first, second = read_server_key(SecuritySettings()), read_server_key(SecuritySettings())
    assert len(first) == 32
    assert first != second


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "it cannot be read"),
        (b"k" * 15, "it holds 15 bytes; allowed is 16..4096"),
        (b"k" * 4097, "more than"),
    ],
)
def test_a_server_key_that_is_no_key_is_refused(tmp_path, content, problem):
    """A short key could be guessed; the message has the key of the setting, not the secret."""
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    message = refused(read_server_key, SecuritySettings(server_key_file=str(path)))
    assert message.startswith("security.server_key_file = ")
    assert problem in message


def test_every_setting_describes_itself():
    """The list for people is the list that is checked: every field, and defaults that load as written."""
    described = {entry.key: entry for entry in describe()}
    sections = {
        "server": ServerSettings,
        "arena": ArenaSettings,
        "lease": LeaseSettings,
        "limits": LimitsSettings,
        "security": SecuritySettings,
        "ucx": UcxSettings,
        "tenants.NAME": TenantSettings,
    }
    expected = {
        f"{table}.{field.name}": field.default
        for table, section in sections.items()
        for field in dataclasses.fields(section)
        if field.name != "name"
    }
    assert described.keys() == expected.keys()
    for key, entry in described.items():
        value = tomllib.loads(f"x = {entry.default}")["x"]
        value = units.parse_size(value) if entry.type == "size" and isinstance(value, str) else value
        assert value == (expected[key] if entry.type != "array of integers" else [])
        assert all((entry.type, entry.meaning, entry.allowed))


def outcome(*args):
    """Return the settings, or the message of the ConfigError; anything else that is raised fails the test."""
    try:
        return load(*args)
    except ConfigError as error:
        return str(error)


SCALARS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(lambda number: repr(number).replace("e+", "e")),
    st.sampled_from(
        ["true", "false", "'1GiB'", "'x:1'", "''", "[]", "{}", "1979-05-27", "07:32:00", "0x" + "f" * 9999]
    ),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="'")).map(
        "'{}'".format
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3).map(lambda found: f"[{', '.join(found)}]"),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [entry.key.replace("NAME", name) for entry in describe() for name in ("default", "acme")]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.dictionaries(KEYS, st.text(), max_size=2))
def test_any_values_are_settings_or_one_line(tmp_path, values, flags):
    """Of well-formed files and flags with random values each is taken or refused, never a crash."""
    path = tmp_path / "kv.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in values.items()), encoding="utf-8")
    found = outcome(path, {}, flags)
    assert isinstance(found, Settings) or len(found.splitlines()) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.text(alphabet="[]=.\"'\n ,{}#0x1etarnslmiud_", max_size=60) | st.text())
def test_any_text_is_settings_or_one_line(tmp_path, text):
    """Of any text at all, well formed or not, only ConfigError or Settings comes."""
    path = tmp_path / "kv.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = outcome(path, {}, {})
    assert isinstance(found, Settings) or len(found.splitlines()) == 1


def test_the_variable_of_the_clients_is_none_of_the_daemons() -> None:
    """A shell in which KVSERVICE_ENDPOINT is set for clients can start a daemon all the same."""
    assert load(None, {"KVSERVICE_ENDPOINT": "unix:/run/kv.sock"}) == load(None, {})
