"""Real vLLM engines around a real daemon: whatever happens to the daemon, the tokens are those of one engine
alone.

One daemon address and four engines serve all tests: `plain` has no connector, `prefill` stores, `decode`
    loads, and
`careless` loads without checking what comes. Each test begins with a fresh daemon and with engines that
remember nothing.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, ROOT, Daemon, Engine, transfer_config, vllm_engine
from stored_bytes import alter

from kvclient import ClientSettings
from kvclient.sync import KvClient

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
BLOCK_TOKENS = 32
BLOCK_BYTES = 256 << 10  # four layers, four heads, 2 x 64 floats a token
CAPACITY_BYTES = 128 << 20
SEGMENT_BYTES = 32 << 20
ANSWER_TOKENS = 12
RECONNECT_TIMEOUT_S = 60.0
# `decode` has room for 3,072 tokens: enough for one request, and little enough to preempt.
DECODE_KV_BYTES = 96 * BLOCK_BYTES
# Long enough that a busy machine is not taken for a dead service, short enough to wait for one.
IMPATIENCE = {"lookup_timeout_ms": 2_000, "transfer_timeout_ms": 3_000, "retry_after_ms": 100}

Answer = dict[str, Any]


def drawn(count: int, seed: int) -> list[int]:
    """Return a prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(count)]


WARM = drawn(BLOCK_TOKENS + 1, 0)
LONG = drawn(1000, 7)
PROMPTS = [*(drawn(count, count) for count in (31, 32, 64, 65, 317)), LONG, LONG[:512] + drawn(100, 8)]
# Whole blocks before the last token of each: what may be loaded. The last prompt shares 16 with the one
# before it.
LOADABLE_BLOCKS = 0 + 0 + 1 + 2 + 9 + 31 + 19
STORED_BLOCKS = 0 + 1 + 2 + 2 + 9 + 31 + 3


class World:
    """The engines, and the daemon of the hour."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._daemons = ExitStack()
        self.daemon = self.start_daemon()
        model = folder / "model"
        subprocess.run([str(PYTHON), str(HERE / "tiny_llama.py"), str(model)], check=True, timeout=180)
        endpoint = self.daemon.endpoint
        stores = transfer_config("kv_producer", endpoint, **IMPATIENCE)
        loads = transfer_config("kv_consumer", endpoint, blocks_per_call_max=4, **IMPATIENCE)
        trusts = transfer_config("kv_consumer", endpoint, verify=False, **IMPATIENCE)
        small = ["--kv-bytes", str(DECODE_KV_BYTES)]
        chunked = ["--step-tokens", "512"]

        def engine(
            name: str, transfer: dict[str, Any] | None = None, more: list[str] | None = None
        ) -> Engine:
            return vllm_engine(name, PYTHON, model, folder, transfer=transfer, more=more or [])

        # One after the other: on two cores four imports of vLLM at once take longer than in a row.
        self.plain = stack.enter_context(engine("plain"))
        self.prefill = stack.enter_context(engine("prefill", stores, chunked))
        self.decode = stack.enter_context(engine("decode", loads, small))
        self.careless = stack.enter_context(engine("careless", trusts))
        self.expected = self.plain.generate(PROMPTS, ANSWER_TOKENS)["tokens"]

    def start_daemon(
        self, *, capacity_bytes: int = CAPACITY_BYTES, segment_bytes: int = SEGMENT_BYTES
    ) -> Daemon:
        """Start a daemon where the engines look for it; an earlier one must have ended."""
        daemon = Daemon(
            self._folder / "kv.sock",
            self._folder,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
        )
        self.daemon = self._daemons.enter_context(daemon)
        return self.daemon

    def close(self) -> None:
        """End whatever daemon there is."""
        self._daemons.close()

    def fresh(self, **sizes: int) -> None:
        """Begin again: an empty daemon, engines that remember nothing, and all of them connected."""
        self.daemon.kill()
        self.start_daemon(**sizes)
        self.connect()
        self.prefill.reset()

    def connect(self) -> None:
        """Have all engines find the daemon, which they look for in the background."""
        self.repeat(self.prefill, "blocks_known")
        for engine in (self.decode, self.careless):
            self.repeat(engine, "blocks_loaded")

    def repeat(self, engine: Engine, counter: str) -> None:
        """Give an engine one short prompt until the counter moves; only `prefill` keeps its own cache."""
        until = time.monotonic() + RECONNECT_TIMEOUT_S
        while not engine.generate([WARM], 1)["counters"][counter]:
            assert time.monotonic() < until, f"{engine.name} never found the daemon"
            if engine is not self.prefill:
                engine.reset()
        if engine is not self.prefill:
            engine.reset()

    def store(self) -> Answer:
        """Let `prefill` store all prompts."""
        self.prefill.reset()
        return self.prefill.generate(PROMPTS, 1)

    def load(self, engine: Engine | None = None, **more: Any) -> Answer:
        """Answer all prompts with an engine that remembers nothing."""
        engine = engine or self.decode
        engine.reset()
        return engine.generate(PROMPTS, ANSWER_TOKENS, **more)

    def leases_count(self) -> int:
        """Count the leases that the daemon believes to be held."""
        settings = ClientSettings(endpoint=self.daemon.endpoint, client_name="test")
        with KvClient.connect(settings) as client:
            return sum(owner.leases_count for owner in client.list_tiers().owners)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start everything once."""
    with ExitStack() as stack:
        found = World(tmp_path_factory.mktemp("vllm"), stack)
        stack.callback(found.close)
        yield found


@pytest.fixture
def world(engines: World) -> World:
    """Begin each test afresh."""
    engines.fresh()
    return engines


def test_decode_answers_as_one_engine_alone_with_blocks_that_prefill_computed(world: World) -> None:
    """The passage itself: equal tokens, and every block that can be loaded is; vLLM's own count agrees."""
    stored = world.store()
    answer = world.load()
    assert [tokens[0] for tokens in stored["tokens"]] == [tokens[0] for tokens in world.expected]
    assert answer["tokens"] == world.expected
    assert stored["counters"]["blocks_saved"] == STORED_BLOCKS
    assert answer["counters"]["blocks_loaded"] == LOADABLE_BLOCKS
    assert answer["counters"]["bytes_loaded"] == LOADABLE_BLOCKS * BLOCK_BYTES
    assert answer["sources"]["external_kv_transfer"] == LOADABLE_BLOCKS * BLOCK_TOKENS
    assert answer["counters"]["blocks_lost"] == answer["counters"]["faults"] == 0
    assert world.leases_count() == 0


def test_another_salt_finds_nothing(world: World) -> None:
    """What one customer stored, another must not hit, nor tell from its absence."""
    world.store()
    answer = world.load(salt="another customer")
    assert answer["counters"]["blocks_promised"] == 0
    assert answer["tokens"] == world.expected


def test_altered_blocks_are_refused_and_computed(world: World) -> None:
    """A wrong byte in the store must cost time and never a token."""
    world.store()
    alter(world.daemon.process.pid, segment_bytes=SEGMENT_BYTES)
    answer = world.load()
    assert answer["tokens"] == world.expected
    assert answer["counters"]["blocks_loaded"] == 0
    assert answer["counters"]["blocks_lost"] == answer["counters"]["blocks_promised"] > 0
    assert world.leases_count() == 0


def test_without_checking_altered_blocks_are_wrong_tokens(world: World) -> None:
    """The control of all other tests: it is the loaded bytes that decode uses."""
    world.store()
    assert world.load(world.careless)["tokens"] == world.expected
    alter(world.daemon.process.pid, segment_bytes=SEGMENT_BYTES)
    answer = world.load(world.careless)
    assert answer["counters"]["blocks_loaded"] == LOADABLE_BLOCKS
    are_equal = [one == other for one, other in zip(answer["tokens"], world.expected, strict=True)]
    assert are_equal == [len(prompt) <= BLOCK_TOKENS for prompt in PROMPTS]


def test_blocks_lost_in_the_middle_are_computed_from_there(world: World) -> None:
    """What came before the hole is used, what lies behind it is computed; and nothing is asked for again."""
    world.store()
    alter(world.daemon.process.pid, segment_bytes=SEGMENT_BYTES, stride_bytes=2 << 20)
    answer = world.load()
    counters = answer["counters"]
    assert answer["tokens"] == world.expected
    assert counters["blocks_loaded"] > 0
    assert counters["blocks_lost"] > 0
    assert counters["loads_failed"] > 0
    assert counters["lookups"] == sum(len(prompt) > BLOCK_TOKENS for prompt in PROMPTS)


def test_a_daemon_killed_under_load_costs_no_token(world: World) -> None:
    """Killed at any moment of a passage: the engines answer, and in time."""
    for _ in range(3):
        world.fresh()
        world.store()
        world.decode.reset()
        world.decode.send({"op": "generate", "prompts": PROMPTS, "max_tokens": ANSWER_TOKENS})
        world.prefill.send({"op": "generate", "prompts": PROMPTS, "max_tokens": 1})
        world.daemon.kill()
        assert world.decode.receive(timeout_s=30)["tokens"] == world.expected
        world.prefill.receive(timeout_s=30)
        assert world.load()["tokens"] == world.expected
        assert world.store()["counters"]["blocks_saved"] == 0


def test_engines_find_a_restarted_daemon_and_fill_it_again(world: World) -> None:
    """Nobody restarts an engine because the daemon was; blocks that prefill still has itself are stored
    anew.
    """
    world.store()
    world.daemon.kill()
    assert world.load()["tokens"] == world.expected
    world.start_daemon()
    world.connect()
    assert world.prefill.generate(PROMPTS, 1)["counters"]["blocks_saved"] == STORED_BLOCKS
    answer = world.load()
    assert answer["tokens"] == world.expected
    assert answer["counters"]["blocks_loaded"] == LOADABLE_BLOCKS, answer


def test_a_daemon_that_does_not_answer_delays_and_never_hangs(world: World) -> None:
    """A stalled daemon holds up one call for its deadline; after that nobody waits for it."""
    world.store()
    world.decode.reset()
    world.daemon.signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        answer = world.decode.generate(PROMPTS, ANSWER_TOKENS)
        stored = world.prefill.generate(PROMPTS, 1)
        took_s = time.monotonic() - begin
    finally:
        world.daemon.signal(signal.SIGCONT)
    assert answer["tokens"] == world.expected
    assert answer["counters"]["calls_lost"] + stored["counters"]["calls_lost"] > 0
    assert took_s < 20
    world.connect()
    assert world.load()["counters"]["blocks_loaded"] == LOADABLE_BLOCKS


def test_a_full_daemon_takes_nothing_and_disturbs_nobody(world: World) -> None:
    """What does not fit is not stored, and the request is answered all the same."""
    world.fresh(capacity_bytes=2 << 20, segment_bytes=2 << 20)
    stored = world.store()
    assert [tokens[0] for tokens in stored["tokens"]] == [tokens[0] for tokens in world.expected]
    assert stored["counters"]["blocks_unsaved"] > 0
    assert stored["counters"]["calls_lost"] == 0
    assert world.load()["tokens"] == world.expected


def test_a_reset_with_the_connector_empties_the_service(world: World) -> None:
    """Whoever changes weights in place says so by this; old KV must not come back from anywhere."""
    world.store()
    assert world.decode.ask({"op": "reset", "service": True}) == {"reset": True}
    answer = world.load()
    assert answer["counters"]["blocks_promised"] == 0
    assert answer["tokens"] == world.expected


def test_requests_aborted_while_they_load_leave_nothing(world: World) -> None:
    """After an abort at any step vLLM has its blocks back and the daemon its leases (vLLM #46283)."""
    world.store()
    for steps in range(4):
        world.decode.reset()
        aborted = world.decode.ask({"op": "abort", "prompts": PROMPTS, "steps": steps})
        assert aborted == {"aborted": len(PROMPTS), "left": 0}
        assert world.leases_count() == 0
    assert world.load()["tokens"] == world.expected


def test_preempted_requests_load_again_and_answer_alike(world: World) -> None:
    """Preemption frees a request's blocks while others load; it starts over, and may load once more."""
    prompts = [drawn(600, 100 + number) for number in range(6)]
    expected = world.plain.generate(prompts, 96)["tokens"]
    world.prefill.generate(prompts, 1)
    answer = world.decode.generate(prompts, 96)
    assert answer["preemptions"] > 0
    assert answer["tokens"] == expected
    assert answer["counters"]["blocks_loaded"] >= 6 * 18
    assert world.leases_count() == 0
