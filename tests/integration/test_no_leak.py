"""Clients come and go, and nothing of them stays."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.integration.daemon_process import content, keys, opened, tier, until


def shared_memory_files() -> set[str]:
    """List what lies in /dev/shm under any name of ours."""
    return {path.name for path in Path("/dev/shm").iterdir() if "kv" in path.name.lower()}


def mapped_bytes(pid: int) -> int:
    """Return the size of a process's address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def descriptors_count() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("way", ["lane", "grpc"])
def test_clients_that_leave_take_everything_along(daemon, start_child, way):
    """After clients came and went, in order and by the knife, descriptors and sessions are as before."""
    endpoint = getattr(daemon, way)
    before_files = shared_memory_files()
    with opened(daemon.lane, client_name="onlooker") as (client, onlooker):
        with opened(endpoint) as (_, first):
            first.put(keys(range(8)), content(range(8)))
            first.get(keys(range(8)), content(range(8)))
        until(lambda: len(client.list_tiers().owners) == 1, "the first has left")
        settled = daemon.descriptors_count()
        for number in range(12):
            with opened(endpoint, salt=bytes([number])) as (_, namespace):
                namespace.put(keys(range(8)), content(range(8)))
                with namespace.lease(keys(range(8))):
                    namespace.reserve(keys([99]))
        for verb, word in (("reserve", "reserved"), ("put-and-leave", "left")):
            client.purge(onlooker)
            child = start_child(verb, daemon.lane)
            assert child.hear() == word
            child.kill()
        until(lambda: len(client.list_tiers().owners) == 1, "all but the onlooker have left")
        until(lambda: daemon.descriptors_count() <= settled, "descriptors are back")
        counts = tier(client)
        assert (counts.slots_reserved_count, counts.slots_quarantined_count) == (0, 0)
        assert counts.slots_evicting_count == 0
        assert not client.list_tiers().owners[0].leases_count
    assert shared_memory_files() == before_files
    daemon.kill()
    assert shared_memory_files() == before_files


def test_connections_that_say_nothing_cost_nothing(daemon):
    """A port scanner leaves no descriptor behind."""
    with opened(daemon.lane) as (client, _):
        settled = daemon.descriptors_count()
        for _ in range(200):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(daemon.socket_path)
            with socket.create_connection(("127.0.0.1", int(daemon.tcp_address.rpartition(":")[2]))):
                pass
        until(lambda: daemon.descriptors_count() <= settled, "descriptors are back")
        assert len(client.list_tiers().owners) == 1


def test_a_client_unmaps_what_it_mapped(daemon):
    """The client's own process is as it was once its clients are closed."""
    with opened(daemon.lane) as (_, namespace):
        namespace.put(keys(range(64)), content(range(64)))
    descriptors, size_bytes = descriptors_count(), mapped_bytes(os.getpid())
    for _ in range(10):
        with opened(daemon.lane) as (_, namespace):
            assert namespace.get(keys(range(64)), content(range(64))).prefix_count == 64
    assert descriptors_count() <= descriptors
    assert mapped_bytes(os.getpid()) - size_bytes < 32 << 20
