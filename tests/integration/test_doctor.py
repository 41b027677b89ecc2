"""`kvservice doctor`: what it measures, what it says of the rest, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx import why_not
from tests.integration.daemon_process import ROOT, WAIT_LIMIT_S, plain_environment

DOCTOR = [sys.executable, "-m", "kvservice", "doctor"]
SMALL = ["--bytes", str(2 << 20), "--devices", "lo"]
NO_UCX = why_not(EndpointSettings())


@dataclass(frozen=True, slots=True)
class OtherHost:
    """A network namespace with a wire to ours. here: our address on it."""

    name: str
    here: str


@pytest.fixture
def other_host():
    """Give a network of its own, which only root can make."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and the command ip")
    name, net = f"kvt{os.getpid()}", f"10.{os.getpid() % 200 + 10}.7"
    ours, theirs = f"kvo{os.getpid()}", f"kvi{os.getpid()}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _ip("address", "add", f"{net}.1/24", "dev", ours)
        _ip("link", "set", ours, "up")
        for words in (
            ("address", "add", f"{net}.2/24", "dev", theirs),
            ("link", "set", theirs, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", name, *words)
        yield OtherHost(name, f"{net}.1")
    finally:
        _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=WAIT_LIMIT_S)


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        [*DOCTOR, *arguments],
        cwd=ROOT,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=3 * WAIT_LIMIT_S,
        check=False,
    )


def wires_of(result: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict]:
    """Return what it found, by place and transport."""
    assert result.returncode in {0, 6}, result.stderr
    return {(wire["to"], wire["transport"]): wire for wire in json.loads(result.stdout)["wires"]}


def test_on_one_host_it_measures_shared_memory_and_the_engines_next_door(daemon):
    """What is selected has figures and a reason; what is not has a reason."""
    wires = wires_of(doctor("--endpoint", daemon.lane, "--json", *SMALL))
    shm = wires["the arena of the daemon", "shm"]
    assert shm["is_selected"]
    assert min(shm["write_gbps"], shm["read_gbps"]) > 0
    assert shm["latency_us"] > 0
    tcp = wires["the arena of the daemon", "tcp"]
    assert not tcp["is_selected"]
    assert "--endpoint grpc://" in tcp["why"]
    engines = wires["another engine of this host", "ucx"]
    assert engines["is_selected"] == (not NO_UCX)
    assert NO_UCX or "cma" in engines["details"]


def test_over_grpc_it_measures_what_a_client_elsewhere_uses(daemon):
    """Shared memory is known to be better where it could be had."""
    wires = wires_of(doctor("--endpoint", daemon.grpc, "--json", *SMALL))
    assert wires["the arena of the daemon", "tcp"]["is_selected"]
    assert f"--endpoint {daemon.lane}" in wires["the arena of the daemon", "shm"]["why"]


@pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)
def test_an_arena_that_is_lent_over_ucx_is_measured_too(start_daemon):
    """Reads by it have a figure, and the reason why they are not what is used."""
    daemon = start_daemon(settings={"ucx.enabled": "on", "ucx.devices": "lo"})
    wires = wires_of(doctor("--endpoint", daemon.grpc, "--json", *SMALL))
    ucx = wires["the arena of the daemon", "ucx"]
    assert ucx["read_gbps"] > 0
    assert not ucx["is_selected"]
    assert "RDMA" in ucx["why"]


def test_what_is_too_slow_ends_with_a_code_of_its_own(daemon):
    """A floor that nothing reaches: the lines say which way, and the code is 6."""
    result = doctor("--endpoint", daemon.lane, "--floor-gbps", "1000000", *SMALL)
    assert result.returncode == 6
    assert "the arena of the daemon by shm" in result.stdout
    assert "less than the floor" in result.stdout


def test_without_a_daemon_it_says_so(tmp_path):
    """One line, and exit code 1."""
    result = doctor("--endpoint", f"unix:{tmp_path}/none.sock")
    assert result.returncode == 1
    assert result.stderr.startswith("kvservice: no daemon listens at")
    assert len(result.stderr.splitlines()) == 1


def test_a_ucx_that_is_not_there_is_named(daemon, tmp_path):
    """The reason is the library that was asked for."""
    result = doctor("--endpoint", daemon.lane, "--library", f"{tmp_path}/libucp.so", "--json", *SMALL)
    engines = wires_of(result)["another engine of this host", "ucx"]
    assert not engines["is_usable"]
    assert "libucp.so" in engines["why"] or NO_UCX


def test_between_two_network_namespaces(start_daemon, other_host):
    """The other side is another host, as far as the network tells: what is selected is measured over it."""
    daemon = start_daemon(
        grpc_listen=f"{other_host.here}:0",
        tcp_listen=f"{other_host.here}:0",
        settings={} if NO_UCX else {"ucx.enabled": "on"},
    )
    command = ["ip", "netns", "exec", other_host.name, *DOCTOR]
    command += ["--endpoint", daemon.grpc, "--json", "--bytes", str(2 << 20)]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=3 * WAIT_LIMIT_S,
        check=False,
    )
    tcp = wires_of(result)["the arena of the daemon", "tcp"]
    assert tcp["is_selected"]
    assert min(tcp["write_gbps"], tcp["read_gbps"]) > 0
    if not NO_UCX:
        assert wires_of(result)["the arena of the daemon", "ucx"]["read_gbps"] > 0
