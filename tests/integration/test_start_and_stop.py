"""How a daemon starts, refuses to start, and stops: each with one clear line and its code."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvclient import PeerUnavailableError
from kvclient.sync import KvClient
from tests.integration.daemon_process import (
    ROOT,
    content,
    keys,
    opened,
    plain_environment,
    settings_of,
    until,
)

NO_WIRES = ["--grpc-listen", "", "--tcp-listen", ""]


def serve(*arguments: str, **settings) -> tuple[int, list[str]]:
    """Run a daemon that cannot start; return its exit code and the lines that it said."""
    command = [sys.executable, "-m", "kvservice", "serve", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=plain_environment({key.replace("__", "."): value for key, value in settings.items()}),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert not done.stdout
    return done.returncode, done.stderr.splitlines()


def check_refuses(code: int, words: list[str], *arguments: str, **settings) -> None:
    """Hold a refusal to its code, and to one line that names everything it must."""
    actual, lines = serve(*arguments, **settings)
    assert actual == code, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("kvservice: ")
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.fixture
def taken_port():
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_bad_flag_exits_2_with_key_value_and_range():
    """Configuration errors name the key, the value, and what is allowed."""
    check_refuses(2, ["arena.capacity_bytes", "'8XB'", "1MiB..16TiB"], "--capacity-bytes", "8XB")


def test_a_bad_variable_exits_2():
    """An unknown key is an error that names the closest one."""
    check_refuses(2, ["KVSERVICE_ARENA__CAPACITY_BITES", "CAPACITY_BYTES"], arena__capacity_bites="1MiB")


def test_a_bad_file_exits_2(tmp_path):
    """The file is named, and so is the key; a file that is not there is an error too."""
    path = tmp_path / "bad.toml"
    path.write_text("[lease]\nttl_ms = 5\n")
    check_refuses(2, ["lease.ttl_ms", "5", str(path), "100"], "--config", str(path))
    check_refuses(2, ["missing.toml"], "--config", str(tmp_path / "missing.toml"))


def test_settings_that_contradict_each_other_exit_2():
    """Both values are named, since either may be the wrong one."""
    words = ["lease.renew_interval_ms = 900", "lease.ttl_ms = 800"]
    check_refuses(2, words, lease__renew_interval_ms=900, lease__ttl_ms=800)


@pytest.mark.parametrize("flag", ["--grpc-listen", "--tcp-listen"])
def test_a_port_in_use_exits_3_with_one_line(tmp_path, taken_port, flag):
    """The address is named; nothing else is said, by no library either."""
    other = {"--grpc-listen": "--tcp-listen", "--tcp-listen": "--grpc-listen"}[flag]
    arguments = [flag, f"127.0.0.1:{taken_port}", other, "127.0.0.1:0"]
    socket_path = tmp_path / "lane.sock"
    check_refuses(
        3, [str(taken_port)], *arguments, "--socket-path", str(socket_path), "--capacity-bytes", "4MiB"
    )
    assert not socket_path.exists()


def test_a_socket_in_use_exits_3_and_is_left_alone(daemon):
    """A second daemon at one path is refused, and the first serves on."""
    path = daemon.socket_path
    check_refuses(3, [path], *NO_WIRES, "--socket-path", path, "--capacity-bytes", "4MiB")
    with opened(daemon.lane) as (client, _):
        assert client.list_tiers().tiers


def test_too_little_memory_exits_4_with_what_there_is():
    """The line says how much could be had."""
    check_refuses(4, ["arena.capacity_bytes = ", "available", "or less"], "--capacity-bytes", "8TiB")


def test_a_stale_socket_file_is_replaced(start_daemon):
    """A daemon that was killed leaves its socket; the next one takes the path."""
    first = start_daemon()
    first.kill()
    assert Path(first.socket_path).exists()
    with opened(start_daemon().lane) as (_, namespace):
        assert namespace.put(keys([1]), content([1])).stored_count == 1


def test_a_file_that_is_no_socket_is_never_deleted(tmp_path):
    """Only a dead socket may be replaced: a wrong path must not cost anybody a file."""
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    command = [sys.executable, "-m", "kvservice", "serve", "--socket-path", str(path), *NO_WIRES]
    errors = tmp_path / "stderr"
    with errors.open("w") as said:
        process = subprocess.Popen(
            [*command, "--capacity-bytes", "4MiB"], cwd=ROOT, env=plain_environment(), stderr=said
        )
        try:
            until(lambda: process.poll() is not None or "\n" in errors.read_text(), "it serves or refuses")
        finally:
            process.kill()
            process.wait()
    assert path.is_file()
    assert path.read_text() == "precious"


def test_flags_win_over_variables_and_variables_over_the_file(start_daemon):
    """Order of increasing precedence: default, file, environment, flag."""
    daemon = start_daemon(
        config="[lease]\nttl_ms = 7000\nmax_ttl_ms = 8000\n[limits]\nmax_batch_keys = 11\n"
        '[arena]\ncapacity_bytes = "2MiB"\n',
        settings={"lease.ttl_ms": 6000, "arena.capacity_bytes": "4MiB", "limits.max_leases_per_session": 5},
        capacity="8MiB",
    )
    with KvClient.connect(settings_of(daemon.lane)) as client:
        limits = client.attachment.limits
        assert limits.arena_bytes == 8 << 20
        assert client.attachment.lease_ttl_s == 6.0
        assert (limits.max_ttl_ms, limits.max_batch_keys, limits.max_leases) == (8000, 11, 5)
        assert limits.max_reservations == 4096


def test_with_no_configuration_it_serves_at_the_users_socket(tmp_path):
    """`kvservice serve` alone is complete, and a client with no settings finds it."""
    environment = plain_environment({"server.grpc_listen": "127.0.0.1:0", "server.tcp_listen": "127.0.0.1:0"})
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "kvservice", "serve"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert f"unix:{tmp_path}/kvservice.sock grpc://127.0.0.1:" in line
        assert f"arena {1 << 30} bytes in segments of {256 << 20}" in line
        status = [sys.executable, "-m", "kvservice", "status"]
        for name in [one for one in environment if one.startswith("KVSERVICE_")]:
            del environment[name]
        shown = subprocess.run(
            status, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20, check=True
        )
        assert "tier dram" in shown.stdout
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=20)
    assert process.returncode == 0, rest
    assert not (tmp_path / "kvservice.sock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_with_0(daemon, number):
    """An idle daemon stops at once, cleanly, and takes its socket along."""
    with opened(daemon.lane) as (_, namespace):
        namespace.put(keys([1]), content([1]))
    started = time.monotonic()
    daemon.signal(number)
    assert daemon.wait() == 0
    assert time.monotonic() - started < 4.0
    assert not Path(daemon.socket_path).exists()
    with pytest.raises(PeerUnavailableError):
        KvClient.connect(settings_of(daemon.lane))


@pytest.mark.parametrize("way", ["lane", "grpc"])
def test_a_held_lease_delays_the_stop_until_the_drain_timeout(start_daemon, start_child, way):
    """A client that does not let go is waited for, and not longer than server.drain_timeout_ms."""
    daemon = start_daemon(settings={"server.drain_timeout_ms": 1000})
    with opened(daemon.lane) as (_, namespace):
        namespace.put(keys(range(8)), content(range(8)))
    child = start_child("lease", getattr(daemon, way))
    assert child.hear() == "leased 8"
    started = time.monotonic()
    assert daemon.stop() == 0
    assert 0.9 < time.monotonic() - started < 5.0


def test_a_stop_ends_when_the_last_lease_does(start_daemon, start_child):
    """Draining ends with the work, not with the clock."""
    daemon = start_daemon(settings={"server.drain_timeout_ms": 60_000})
    with opened(daemon.lane) as (client, namespace):
        namespace.put(keys(range(8)), content(range(8)))
        child = start_child("lease", daemon.lane)
        assert child.hear() == "leased 8"
        started = time.monotonic()
        daemon.signal(signal.SIGTERM)
        until(lambda: client.list_tiers().tiers and client.is_draining, "the drain is announced")
        assert child.finish() == 0
        assert daemon.wait() == 0
        assert time.monotonic() - started < 20.0


def test_a_folder_that_everybody_may_change_is_no_place_for_the_socket(tmp_path):
    """Another user could put a socket there first, and be given every client's blocks."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    code, lines = serve("--socket-path", str(folder / "lane.sock"), *NO_WIRES)
    assert code == 2
    assert len(lines) == 1
    assert str(folder) in lines[0]
    assert "server.socket_path" in lines[0]
