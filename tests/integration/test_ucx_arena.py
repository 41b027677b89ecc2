"""The arena lent over UCX: whatever happens to its lender or to its readers, the daemon lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvclient.aio
from kvclient import (
    DeadlineError,
    ItemOutcome,
    KvError,
    LeaseExpiredError,
    NoWayError,
    PeerUnavailableError,
)
from kvservice.native import ucx
from kvservice.ports.one_sided import RemoteRead
from tests.integration.daemon_process import (
    BLOCK_BYTES,
    ROOT,
    check_stored,
    content,
    identity,
    keys,
    opened,
    parts,
    plain_environment,
    settings_of,
    tier,
    until,
    until_passed,
)
from tests.integration.remote_arena import (
    HERE,
    OVER_TCP,
    config,
    lender_pid,
    lender_pids,
    reaching,
    transfer,
)
from tests.integration.scripted_child import scripted_child

COUNT = 8
START_S = 20.0
AT_ONCE_S = 3.0
SHORT = """
[lease]
ttl_ms = 1000
renew_interval_ms = 200
heartbeat_timeout_ms = 1000
operation_bound_ms = 1000
"""

pytestmark = pytest.mark.skipif(bool(ucx.why_not()), reason=f"UCX cannot be used: {ucx.why_not()}")


@pytest.fixture
def daemon(start_daemon):
    """A daemon that lends its arena over every road of this host."""
    return start_daemon(config=config())


@pytest.fixture
def quick(start_daemon):
    """The same with short leases, over tcp alone, where the lender itself does the reading and writing."""
    return start_daemon(config=config(OVER_TCP, SHORT))


@contextlib.contextmanager
def reader(daemon, settings=HERE, **fields):
    """A gRPC client that asks for UCX."""
    with opened(daemon.grpc, arena_transport="ucx", one_sided=settings, **fields) as found:
        yield found


def acquire(namespace):
    """Lease the blocks 0 to 7; return the lease and memory for them."""
    lease = namespace.acquire(keys(range(COUNT)))
    assert lease is not None
    return lease, np.zeros((COUNT, BLOCK_BYTES), np.uint8)


def on_their_way(client) -> int:
    """Count the slots that nobody can see and nobody can have."""
    counts = tier(client)
    return counts.slots_reserved_count + counts.slots_evicting_count + counts.slots_quarantined_count


def until_relent(daemon, before: int) -> int:
    """Wait until another process lends the arena; return its number."""
    until(lambda: lender_pids(daemon) not in ([], [before]), "another lender is there", START_S)
    return lender_pid(daemon)


def until_read(transport, namespace) -> None:
    """Wait until the blocks 0 to 7 can be read one-sidedly."""

    def is_read() -> bool:
        lease, into = acquire(namespace)
        try:
            transport.read(transfer(lease.lease_id, lease.slots, into))
        except (NoWayError, PeerUnavailableError):
            return False
        return np.array_equal(into, content(range(COUNT)))

    until(is_read, "the arena can be read again", START_S)


@pytest.mark.parametrize("settings", [HERE, OVER_TCP], ids=["any", "tcp"])
def test_blocks_go_and_come_over_grpc_with_ucx(start_daemon, settings, caplog):
    """Puts over tcp and gets over UCX; nothing falls back, and the daemon says that it has it."""
    daemon = start_daemon(config=config(settings))
    with caplog.at_level(logging.WARNING, "kvclient"), reader(daemon, settings) as (client, namespace):
        assert namespace.put(keys(range(64)), content(range(64))).stored_count == 64
        check_stored(namespace, range(64))
        check_stored(namespace, [3, 60, 9])
        offered = {entry.name: entry.address for entry in client.capabilities().transports}
        assert set(offered) == {"shm", "tcp", "ucx"}
        with reaching(client, daemon.grpc, settings) as (transport, _, _):
            lease, into = acquire(namespace)
            transport.read(transfer(lease.lease_id, lease.slots, into))
            assert np.array_equal(into, content(range(COUNT)))
    assert not caplog.records
    assert daemon.stop() == 0


def test_an_asynchronous_client_reads_over_ucx(daemon, caplog):
    """The transport waits on a thread for calls that its event loop makes."""

    async def run() -> np.ndarray:
        settings = settings_of(daemon.grpc, arena_transport="ucx", one_sided=HERE)
        async with await kvclient.aio.KvClient.connect(settings) as client:
            namespace = await client.open_namespace(identity(), parts())
            await namespace.put(keys(range(32)), content(range(32)))
            into = np.zeros((4, 32, BLOCK_BYTES), np.uint8)
            await asyncio.gather(*(namespace.get(keys(range(32)), each) for each in into))
            return into

    with caplog.at_level(logging.WARNING, "kvclient"):
        found = asyncio.run(run())
    assert (found == content(range(32))).all()
    assert not caplog.records


def test_a_local_session_stores_one_sidedly(daemon):
    """Its death is seen, so it may; the commit is held to what was written. A remote one may not."""
    with opened(daemon.lane) as (client, namespace), reaching(client, daemon.grpc) as (transport, _, _):
        reservation = namespace.reserve(keys(range(COUNT)))
        source = content(range(COUNT))
        moved = transfer(reservation.reservation_id, reservation.slots, source)
        transport.write(moved)
        with pytest.raises(KvError, match="the commit says"):
            client.commit(reservation, moved.checksums + np.uint32(1))
        assert client.commit(reservation, moved.checksums) == COUNT
        check_stored(namespace, range(COUNT))
    with reader(daemon) as (client, namespace), reaching(client, daemon.grpc) as (transport, _, _):
        reservation = namespace.reserve(keys(range(100, 100 + COUNT)))
        with pytest.raises(NoWayError, match="write over tcp"):
            transport.write(transfer(reservation.reservation_id, reservation.slots, source))
        assert client.abort(reservation) is ItemOutcome.DONE
        assert not on_their_way(client)


def test_a_lender_that_is_killed_is_followed_by_another(quick, caplog):
    """Before a read, in the middle of one, and for those that knew the old one: typed errors, or tcp."""
    with (
        caplog.at_level(logging.WARNING, "kvclient"),
        reader(quick, OVER_TCP) as (client, namespace),
        reaching(client, quick.grpc, OVER_TCP) as (transport, authority, endpoint),
    ):
        namespace.put(keys(range(COUNT)), content(range(COUNT)))
        check_stored(namespace, range(COUNT))
        lease, into = acquire(namespace)
        grant = authority.begin_read(lease_id=lease.lease_id, slot_indexes=np.arange(COUNT), timeout_s=10)
        before = lender_pid(quick)
        os.kill(before, signal.SIGKILL)
        old = RemoteRead(
            grant.segments,
            grant.segment_indexes,
            grant.offsets,
            transfer(0, lease.slots, into).pieces.addresses,
            grant.lengths,
            5.0,
        )
        with pytest.raises(PeerUnavailableError):
            endpoint.read(old)
        check_stored(namespace, range(COUNT))
        until_relent(quick, before)
        until_read(transport, namespace)
        with pytest.raises(PeerUnavailableError):
            endpoint.read(old)
        authority.end(grant.transfer_id, checksums=None, is_settled=True)
        check_stored(namespace, range(COUNT))
    told = [record.getMessage() for record in caplog.records]
    assert sum("tcp instead of ucx" in line for line in told) <= 1
    assert quick.said().count("SIGKILL") == 1
    assert quick.stop() == 0


def test_a_reader_goes_on_over_tcp_while_the_lender_hangs(quick, caplog):
    """A stopped lender answers nobody: a read gives up in half of its time, and is done by tcp."""
    with (
        caplog.at_level(logging.WARNING, "kvclient"),
        reader(quick, OVER_TCP, transfer_timeout_s=2.0) as (_, namespace),
    ):
        namespace.put(keys(range(COUNT)), content(range(COUNT)))
        check_stored(namespace, range(COUNT))
        assert not caplog.records
        lender = lender_pid(quick)
        os.kill(lender, signal.SIGSTOP)
        try:
            started = time.monotonic()
            check_stored(namespace, range(COUNT))
            assert 0.9 < time.monotonic() - started < 1.0 + AT_ONCE_S
            assert "tcp instead of ucx" in caplog.text
        finally:
            os.kill(lender, signal.SIGCONT)

        def is_back() -> bool:
            check_stored(namespace, range(COUNT))
            return "reads go over ucx again" in caplog.text

        # UCX may end a lender that finds its reader gone: then it is another one.
        until(is_back, "reads go over ucx again", START_S)
    assert quick.stop() == 0


@pytest.mark.parametrize("settings", [HERE, OVER_TCP], ids=["any", "tcp"])
def test_a_lender_that_dies_under_reads_costs_typed_errors_and_no_byte(start_daemon, settings, rng):
    """Killed at any moment: what is read is right or an error that says so, and the daemon goes on."""
    daemon = start_daemon(config=config(settings))
    outcomes: Counter[str] = Counter()
    is_over = threading.Event()

    def read_on(transport, namespace) -> None:
        while not is_over.is_set():
            lease, into = acquire(namespace)
            try:
                transport.read(transfer(lease.lease_id, lease.slots, into, timeout_s=5.0))
            except (NoWayError, PeerUnavailableError, DeadlineError) as error:
                outcomes[type(error).__name__] += 1
                continue
            outcomes["good" if np.array_equal(into, content(range(COUNT))) else "bad"] += 1

    with (
        reader(daemon, settings) as (client, namespace),
        reaching(client, daemon.grpc, settings) as (transport, _, _),
        ThreadPoolExecutor(2) as pool,
    ):
        namespace.put(keys(range(COUNT)), content(range(COUNT)))
        reading = [pool.submit(read_on, transport, namespace) for _ in range(2)]
        try:
            for _ in range(3):
                before, goods = lender_pid(daemon), outcomes["good"]
                until(lambda goods=goods: outcomes["good"] > goods, "reads succeed", START_S)
                until_passed(rng.uniform(0, 0.05))
                os.kill(before, signal.SIGKILL)
                until_relent(daemon, before)
        finally:
            is_over.set()
        for each in reading:
            each.result(START_S)
        until_read(transport, namespace)
        check_stored(namespace, range(COUNT))
    assert not outcomes["bad"], outcomes
    assert outcomes["NoWayError"] + outcomes["PeerUnavailableError"] > 0, outcomes
    assert daemon.stop() == 0


def test_a_wild_address_ends_the_lender_and_nothing_else(quick, tmp_path):
    """Over tcp it makes the lender fault; the daemon goes on, and lends the arena anew."""
    with opened(quick.lane) as (local, stored):
        stored.put(keys(range(COUNT)), content(range(COUNT)))
        with reader(quick, OVER_TCP) as (client, namespace):
            with reaching(client, quick.grpc, OVER_TCP) as (transport, authority, _):
                lease, _ = acquire(namespace)
                grant = authority.begin_read(lease_id=lease.lease_id, slot_indexes=np.arange(1), timeout_s=10)
                way = grant.segments[0].ways[0]
                authority.end(grant.transfer_id, checksums=None, is_settled=True)
                before = lender_pid(quick)
                script = ("remote_arena_child.py", "wild", way.address.hex(), way.key.hex())
                with scripted_child(*script) as child:
                    assert child.hear() == "PeerUnavailableError"
                until_relent(quick, before)
                until_read(transport, namespace)
            check_stored(namespace, range(COUNT))
        assert len(local.list_tiers().owners) == 1
    assert "SIGSEGV" in quick.said()
    assert quick.stop() == 0


def test_bytes_of_a_slot_that_moved_on_are_discarded(daemon):
    """A lease that has ended begins no read, and one that ends meanwhile makes the read fail."""
    with reader(daemon) as (client, namespace), reaching(client, daemon.grpc) as (transport, authority, _):
        namespace.put(keys(range(COUNT)), content(range(COUNT)))
        lease, into = acquire(namespace)
        grant = authority.begin_read(lease_id=lease.lease_id, slot_indexes=np.arange(COUNT), timeout_s=10)
        client.release([lease])
        client.purge(namespace)
        assert tier(client).slots_evicting_count == COUNT
        with pytest.raises(LeaseExpiredError):
            authority.end(grant.transfer_id, checksums=None, is_settled=True)
        assert not on_their_way(client)
        namespace.put(keys(range(200, 200 + 200)), content(range(200, 400)))
        with pytest.raises(LeaseExpiredError):
            transport.read(transfer(lease.lease_id, lease.slots, into))
        assert not into.any()


def test_a_session_that_ends_has_no_transfers_left(quick):
    """By its good-bye at once; by its silence, when it cannot be reading any more."""
    with opened(quick.lane) as (local, stored):
        for end in ("finish", "kill"):
            stored.put(keys(range(COUNT)), content(range(COUNT)))
            with scripted_child("remote_arena_child.py", "read", quick.grpc, quick.grpc, 1.5) as child:
                assert child.hear() == f"begun {COUNT}"
                local.purge(stored)
                assert tier(local).slots_evicting_count == COUNT
                getattr(child, end)()
                until(lambda: not on_their_way(local), "the slots are free", 2.5 + AT_ONCE_S)
        assert len(local.list_tiers().owners) in {1, 2}
    assert quick.stop() == 0


def test_a_stopped_reader_holds_nothing_for_longer_than_the_bound(quick):
    """Its session ends by its silence, its pins with its own deadline and the time of one operation."""
    with opened(quick.lane) as (local, stored):
        stored.put(keys(range(COUNT)), content(range(COUNT)))
        with scripted_child("remote_arena_child.py", "read", quick.grpc, quick.grpc, 6.0) as child:
            assert child.hear() == f"begun {COUNT}"
            local.purge(stored)
            child.signal(signal.SIGSTOP)
            until(child.is_stopped, "it stands still")
            until(lambda: len(local.list_tiers().owners) == 1, "its session has ended", 1.0 + AT_ONCE_S)
            assert tier(local).slots_evicting_count == COUNT
            stored.put(keys(range(300, 310)), content(range(300, 310)))
            check_stored(stored, range(300, 310))
            until(lambda: not on_their_way(local), "the slots are free", 6.0 + 1.0 + AT_ONCE_S)
            assert child.is_stopped()
    assert quick.stop() == 0


def test_a_writer_that_dies_is_cut_off_before_its_slots_are_used_again(quick):
    """Its bytes may be on their way to the lender, which is ended and started anew for it."""
    with opened(quick.lane) as (local, stored):
        stored.put(keys(range(COUNT)), content(range(COUNT)))
        before = lender_pid(quick)
        with scripted_child("remote_arena_child.py", "write", quick.lane, quick.grpc, 10) as child:
            assert child.hear() == f"begun {COUNT}"
            assert tier(local).slots_reserved_count == COUNT
            child.kill()
            until(lambda: not on_their_way(local), "the slots are free", AT_ONCE_S)
        assert until_relent(quick, before) != before
        with reader(quick, OVER_TCP) as (client, namespace):
            with reaching(client, quick.grpc, OVER_TCP) as (transport, _, _):
                until_read(transport, namespace)
            check_stored(namespace, range(COUNT))
    assert "cut off" in quick.said()
    assert quick.stop() == 0


def test_the_lender_has_the_segments_and_nothing_else(start_daemon, monkeypatch):
    """Every peer can read it: no page of generations, no directory, no descriptor, no secret is in it."""
    monkeypatch.setenv("SOME_SECRET", "of another program")
    daemon = start_daemon(config=config(), settings={"lease.ttl_ms": 5000})
    with opened(daemon.lane) as (_, namespace):
        namespace.put(keys(range(COUNT)), content(range(COUNT)))
        process = Path("/proc") / str(lender_pid(daemon))
        maps = process.joinpath("maps").read_text()
        assert "memfd:kv-segment" in maps
        assert "memfd:kv-generations" not in maps
        assert "memfd:kv-directory" not in maps
        descriptors = [str(link.readlink()) for link in process.joinpath("fd").iterdir()]
        assert not [target for target in descriptors if "memfd" in target or "lane.sock" in target]
        environment = process.joinpath("environ").read_text()
        assert "PATH=" in environment
        assert "KVSERVICE" not in environment
        assert "SOME_SECRET" not in environment
        daemon_maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "libucp" not in daemon_maps
        assert "libuct" not in daemon_maps
    lender = lender_pid(daemon)
    daemon.kill()
    until(lambda: not Path(f"/proc/{lender}").exists(), "the lender ends with its daemon", AT_ONCE_S)


def test_a_daemon_that_cannot_use_ucx_says_so_and_does_not_start(tmp_path):
    """On one line, with the documented code; half a service would be found out under load."""
    path = tmp_path / "kvservice.toml"
    path.write_text('[ucx]\nenabled = "on"\nlibrary = "/nowhere/libucp.so.0"\n')
    command = [sys.executable, "-m", "kvservice", "serve", "--config", str(path)]
    command += ["--socket-path", str(tmp_path / "lane.sock"), "--grpc-listen", "127.0.0.1:0"]
    command += ["--tcp-listen", "127.0.0.1:0", "--capacity-bytes", "4MiB"]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith('kvservice: ucx.enabled = "on": ')
    assert "/nowhere/libucp.so.0" in line


def test_nothing_is_written_to_stdout(tmp_path):
    """UCX writes its log there, which would break whoever reads a daemon's; it goes into the daemon's log."""
    (tmp_path / "kvservice.toml").write_text(config(OVER_TCP))
    command = [sys.executable, "-m", "kvservice", "serve", "--config", str(tmp_path / "kvservice.toml")]
    command += ["--socket-path", str(tmp_path / "lane.sock"), "--grpc-listen", "127.0.0.1:0"]
    command += ["--tcp-listen", "", "--capacity-bytes", "4MiB"]
    environment = plain_environment() | {"UCX_LOG_LEVEL": "info"}
    output, errors = tmp_path / "stdout", tmp_path / "stderr"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)
    try:
        until(lambda: "serving at" in errors.read_text(), "the daemon serves", START_S)
        grpc = next(word for word in errors.read_text().split() if word.startswith("grpc://"))
        lane = f"unix:{tmp_path / 'lane.sock'}"
        with opened(lane) as (_, stored):
            stored.put(keys(range(COUNT)), content(range(COUNT)))
        with opened(grpc.rstrip(","), arena_transport="ucx", one_sided=OVER_TCP) as (_, namespace):
            check_stored(namespace, range(COUNT))
            with pytest.raises(NoWayError, match="no tcp data plane"):
                namespace.put(keys([50]), content([50]))
    finally:
        process.terminate()
        assert process.wait(START_S) == 0
    assert output.read_text() == ""


def test_a_daemon_that_does_not_lend_is_read_over_tcp(start_daemon, caplog):
    """A client that asks for UCX says once, loudly, that it does not get it, and reads all the same."""
    daemon = start_daemon()
    with caplog.at_level(logging.WARNING, "kvclient"), reader(daemon) as (client, namespace):
        namespace.put(keys(range(COUNT)), content(range(COUNT)))
        for _ in range(3):
            check_stored(namespace, range(COUNT))
        until_passed(1.1)
        check_stored(namespace, range(COUNT))
        assert {entry.name for entry in client.capabilities().transports} == {"shm", "tcp"}
    told = [record.getMessage() for record in caplog.records if "instead of ucx" in record.getMessage()]
    assert len(told) == 1
    assert "does not lend its arena" in told[0]
