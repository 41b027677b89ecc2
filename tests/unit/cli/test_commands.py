"""The command line, run as `main`: replay with every byte checked, status, check-config."""

import contextlib
import json
import random

import numpy as np
import pytest

from kvclient import ClientSettings
from kvclient.sync import KvClient
from kvservice.cli.main import main
from kvservice.cli.replay import Tally, own_daemon

REPLAY_KEYS = {
    "requests",
    "blocks",
    "hits",
    "hit_rate",
    "bytes_put",
    "bytes_got",
    "wrong_blocks",
    "get_gbps",
    "put_gbps",
    "lookup_p50_us",
    "lookup_p99_us",
}
BLOCK_BYTES = 1000


def some_requests(rng: random.Random, count: int) -> list[list[int]]:
    """Make requests of chains that share prefixes, as conversations do."""
    chains: list[list[int]] = [[]]
    fresh = iter(range(10**6))
    requests = []
    for _ in range(count):
        chain = list(rng.choice(chains))
        chain = chain[: rng.randint(0, len(chain))]
        chain += [next(fresh) for _ in range(rng.randint(0, 6))]
        chains.append(chain)
        requests.append(chain)
    return requests


def hits_on_an_infinite_arena(requests: list[list[int]]) -> int:
    """Count the blocks of the longest prefix that earlier requests have stored, request by request."""
    stored: set[int] = set()
    hits = 0
    for chain in requests:
        for number in chain:
            if number not in stored:
                break
            hits += 1
        stored.update(chain)
    return hits


@pytest.fixture
def trace(tmp_path):
    """Return a way to write requests as a trace."""

    def write(requests):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps({"hash_ids": chain}) + "\n" for chain in requests))
        return str(path)

    return write


def run(capsys, *arguments):
    """Run a command; return its code, stdout and stderr."""
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_replay_counts_what_an_infinite_arena_would(trace, capsys, rng):
    """Hits are exactly those of a set of ids; bytes follow; no block is wrong."""
    requests = some_requests(rng, 120)
    path = trace(requests)
    code, out, _ = run(
        capsys, "replay", path, "--json", "--block-bytes", str(BLOCK_BYTES), "--capacity-bytes", "4MiB"
    )
    report = json.loads(out)
    assert code == 0
    assert set(report) >= REPLAY_KEYS
    blocks = sum(map(len, requests))
    hits = hits_on_an_infinite_arena(requests)
    assert (report["requests"], report["blocks"], report["hits"]) == (len(requests), blocks, hits)
    assert report["hit_rate"] == pytest.approx(hits / blocks, abs=1e-6)
    assert report["bytes_got"] == hits * BLOCK_BYTES
    assert report["bytes_put"] == len({number for chain in requests for number in chain}) * BLOCK_BYTES
    assert report["wrong_blocks"] == 0
    assert report["lookup_p50_us"] <= report["lookup_p99_us"]


def test_a_replay_stops_after_n_requests_and_shows_a_table(trace, capsys):
    """`--requests N` reads no further; without --json there is a line for each figure."""
    path = trace([[1, 2], [1, 2, 3], [9]])
    code, out, _ = run(
        capsys, "replay", path, "--requests", "2", "--block-bytes", "512", "--capacity-bytes", "4MiB"
    )
    table = dict(line.split() for line in out.splitlines())
    assert code == 0
    assert set(table) >= REPLAY_KEYS
    assert (table["requests"], table["blocks"], table["hits"]) == ("2", "5", "2")


def test_a_small_arena_costs_hits_and_never_bytes(trace, capsys, rng):
    """Evicted blocks are misses; what is a hit is right."""
    requests = some_requests(rng, 60)
    code, out, _ = run(
        capsys, "replay", trace(requests), "--json", "--block-bytes", "65536", "--capacity-bytes", "1MiB"
    )
    report = json.loads(out)
    assert code == 0
    assert report["wrong_blocks"] == 0
    assert report["hits"] <= hits_on_an_infinite_arena(requests)


def test_a_replay_against_a_daemon_that_runs_finds_what_is_there(trace, capsys):
    """`--endpoint` uses a daemon as it is: a second run of one trace is all hits."""
    path = trace([[1, 2, 3], [4]])
    with own_daemon(4 << 20) as endpoint:
        arguments = ["replay", path, "--json", "--endpoint", endpoint, "--block-bytes", "4096"]
        assert json.loads(run(capsys, *arguments)[1])["hits"] == 0
        assert json.loads(run(capsys, *arguments)[1])["hits"] == 4


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--requests", "0", "'0'"),
        ("--requests", "x", "'x'"),
        ("--block-bytes", "0", "'0'"),
        ("--capacity-bytes", "3XB", "'XB'"),
    ],
)
def test_a_bad_option_is_a_usage_error(trace, capsys, option, value, named):
    """Exit code 2; the option is named, and what is wrong with its value."""
    with pytest.raises(SystemExit) as caught:
        main(["replay", trace([[1]]), option, value])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {option}: " in said
    assert named in said


def test_a_bad_trace_exits_2_with_one_line(trace, tmp_path, capsys):
    """The line of the trace is named; there is no traceback."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": [1]}\n{"hash_ids": "no"}\n')
    code, out, err = run(capsys, "replay", str(path), "--capacity-bytes", "4MiB")
    assert (code, out) == (2, "")
    assert err.startswith(f"kvservice: {path}:2")
    assert len(err.splitlines()) == 1


def test_an_endpoint_without_a_daemon_exits_with_one_line(trace, tmp_path, capsys):
    """Both commands that need a daemon say that there is none, and where they looked."""
    endpoint = f"unix:{tmp_path}/nobody.sock"
    code, _, err = run(capsys, "replay", trace([[1]]), "--endpoint", endpoint)
    assert code == 2
    assert "nobody.sock" in err
    code, out, err = run(capsys, "status", "--endpoint", endpoint)
    assert (code, out) == (1, "")
    assert "nobody.sock" in err
    assert len(err.splitlines()) == 1


def test_a_malformed_endpoint_exits_with_one_line(trace, capsys):
    """A wrong endpoint is an error with a way out, not a traceback."""
    for command in (["status"], ["replay", trace([[1]])]):
        code, _, err = run(capsys, *command, "--endpoint", "http://nowhere")
        assert code in {1, 2}
        assert "grpc://host:port" in err
        assert len(err.splitlines()) == 1


def test_status_shows_tiers_and_owners(capsys):
    """Text for people with the slot equation, JSON for scripts, owners when asked for."""
    with own_daemon(4 << 20) as endpoint, contextlib.ExitStack() as stack:
        settings = ClientSettings(endpoint=endpoint, client_name="the engine")
        stack.enter_context(KvClient.connect(settings))
        code, out, _ = run(capsys, "status", "--endpoint", endpoint)
        assert code == 0
        assert "tier dram: 0 of 4194304 bytes (0%)" in out
        assert "free" in out
        assert "sessions: 2" in out
        assert "the engine" not in out
        _, out, _ = run(capsys, "status", "--endpoint", endpoint, "--owners")
        assert "the engine tenant=default local" in out
        _, out, _ = run(capsys, "status", "--endpoint", endpoint, "--json")
        report = json.loads(out)
        assert report["capabilities"]["tiers"] == ["dram"]
        assert {owner["client_name"] for owner in report["owners"]} == {"the engine", "kvservice status"}
        tier = report["tiers"][0]
        assert int(tier["capacity_bytes"]) == 4 << 20
        assert int(tier["slots_reserved_count"]) == 0


def test_check_config_describes_every_key(tmp_path, capsys):
    """A good file is said to be good, with all that could stand in it; a bad one exits 2."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('[arena]\ncapacity_bytes = "2MiB"\n')
    bad.write_text("[arena]\ncapacity = 1\n")
    code, out, _ = run(capsys, "check-config", str(good))
    assert code == 0
    assert "arena.capacity_bytes = " in out
    assert "no error" in out
    code, _, err = run(capsys, "check-config", str(bad))
    assert code == 2
    assert "arena.capacity_bytes" in err
    assert len(err.splitlines()) == 1


def test_a_tally_of_nothing_divides_by_nothing():
    """An empty trace has rates of zero."""
    report = Tally().report()
    assert set(report) >= REPLAY_KEYS
    assert not any(np.array(list(report.values()), dtype=float))
