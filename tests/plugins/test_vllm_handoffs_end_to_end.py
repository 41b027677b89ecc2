"""Real vLLM engines that hand KV over by UCX: whatever becomes of a handoff, the tokens are those of one
engine alone.

`prefill` offers and `decode` receives, direct and without a store between them; `plain` has no connector.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, ROOT, Daemon, Engine, transfer_config, vllm_engine

from kvclient import ClientSettings, HandoffChoice, HandoffState
from kvclient.sync import KvClient

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
BLOCK_TOKENS = 32
BLOCK_BYTES = 256 << 10  # four layers, four heads, 2 x 64 floats a token
ANSWER_TOKENS = 12
SETTLE_TIMEOUT_S = 20.0
# What is not claimed is given back after this.
WAIT_MS = 5_000
OPTIONS: dict[str, Any] = {
    "handoff": "direct",
    "save_handed_off": False,
    # The loopback and this host's memory: what every machine has.
    "ucx_transports": "self,cma,tcp",
    "ucx_devices": "lo",
    "handoff_wait_ms": WAIT_MS,
    "lookup_timeout_ms": 2_000,
    "transfer_timeout_ms": 3_000,
    "retry_after_ms": 100,
}
ASKS = {"do_remote_decode": True}

Answer = dict[str, Any]


def drawn(count: int, seed: int) -> list[int]:
    """Return a prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(count)]


PROMPTS = [drawn(count, count) for count in (31, 32, 64, 65, 317, 1000)]
OFFERED_BLOCKS = 0 + 1 + 2 + 2 + 9 + 31
LOADABLE_BLOCKS = 0 + 0 + 1 + 2 + 9 + 31


class World:
    """The engines, and the daemon of the hour."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._daemons = ExitStack()
        self.daemon = self.start_daemon()
        model = folder / "model"
        subprocess.run([str(PYTHON), str(HERE / "tiny_llama.py"), str(model)], check=True, timeout=180)

        def engine(name: str, role: str = "") -> Engine:
            transfer = transfer_config(role, self.daemon.endpoint, **OPTIONS) if role else None
            return stack.enter_context(vllm_engine(name, PYTHON, model, folder, transfer=transfer))

        self.plain = engine("plain")
        self.prefill = engine("prefill", "kv_producer")
        self.decode = engine("decode", "kv_consumer")
        self.expected = self.plain.generate(PROMPTS, ANSWER_TOKENS)["tokens"]

    def start_daemon(self) -> Daemon:
        """Start a daemon where the engines look for it; an earlier one must have ended."""
        daemon = Daemon(
            self._folder / "kv.sock", self._folder, capacity_bytes=64 << 20, segment_bytes=16 << 20
        )
        self.daemon = self._daemons.enter_context(daemon)
        return self.daemon

    def close(self) -> None:
        """End whatever daemon there is."""
        self._daemons.close()

    def prefilled(self, prompts: list[list[int]] = PROMPTS) -> Answer:
        """Prefill prompts that are decoded elsewhere."""
        return self.prefill.generate(prompts, 1, transfer=[ASKS] * len(prompts))

    def decoded(self, tickets: list[Any], prompts: list[list[int]] = PROMPTS) -> Answer:
        """Decode prompts with an engine that remembers nothing."""
        self.decode.reset()
        return self.decode.generate(prompts, ANSWER_TOKENS, transfer=tickets)

    def give_back(self) -> None:
        """See that prefill gets all its blocks back; a reset fails while any is held."""
        assert self.prefill.settle(SETTLE_TIMEOUT_S) == 0
        self.prefill.reset()

    def records(self, tickets: list[Any]) -> list[tuple[HandoffChoice, HandoffState]]:
        """Return what the daemon knows of the handoffs of tickets."""
        settings = ClientSettings(endpoint=self.daemon.endpoint, client_name="test")
        with KvClient.connect(settings) as client:
            found = [
                client.handoffs.look(int(number))
                for ticket in tickets
                if ticket
                for number in ticket["kvservice_handoff_ids"]
            ]
        return [(HandoffChoice(each.choice), HandoffState(each.state)) for each in found]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start everything once."""
    with ExitStack() as stack:
        found = World(tmp_path_factory.mktemp("handoffs"), stack)
        stack.callback(found.close)
        yield found


@pytest.fixture
def world(engines: World) -> World:
    """Begin each test with engines that remember nothing and hold nothing."""
    engines.give_back()
    engines.decode.reset()
    return engines


def test_kv_goes_straight_from_engine_to_engine(world: World) -> None:
    """Equal tokens, every whole block pulled out of prefill's memory, and prefill has all of it back."""
    stored = world.prefilled()
    assert [tokens[0] for tokens in stored["tokens"]] == [tokens[0] for tokens in world.expected]
    assert [ticket is not None for ticket in stored["transfer"]] == [False, *[True] * 5]
    assert stored["counters"]["blocks_offered"] == OFFERED_BLOCKS
    assert stored["counters"]["blocks_saved"] == 0
    answer = world.decoded(stored["transfer"])
    counters = answer["counters"]
    assert answer["tokens"] == world.expected
    assert counters["handoffs_direct"] == counters["handoffs_received"] == 4
    assert counters["bytes_handed_over"] == LOADABLE_BLOCKS * BLOCK_BYTES
    assert answer["sources"]["external_kv_transfer"] == LOADABLE_BLOCKS * BLOCK_TOKENS
    assert counters["faults"] == counters["blocks_lost"] == counters["handoffs_failed"] == 0
    # Decode computes the last token itself, so the prompt of one block needs nothing of prefill.
    direct = (HandoffChoice.DIRECT, HandoffState.COMPLETED)
    assert world.records(stored["transfer"]) == [
        (HandoffChoice.UNDECIDED, HandoffState.REJECTED),
        *[direct] * 4,
    ]
    world.give_back()


def test_decode_fetches_only_what_it_does_not_have(world: World) -> None:
    """The first blocks are in its own cache: the handoff is read from the next one on."""
    long = PROMPTS[-1]
    world.decode.generate([long[:512]], 1)
    stored = world.prefilled([long])
    answer = world.decode.generate([long], ANSWER_TOKENS, transfer=stored["transfer"])
    assert answer["tokens"] == world.expected[-1:]
    assert answer["counters"]["bytes_handed_over"] == (31 - 16) * BLOCK_BYTES
    world.give_back()


def test_prefill_keeps_what_is_being_waited_for(world: World) -> None:
    """While a ticket is good its blocks cannot be used again, however much else prefill computes."""
    stored = world.prefilled([PROMPTS[-1]])
    # More than its whole memory, in other prompts: only what is not held may be evicted.
    world.prefill.generate([drawn(1500, 900 + number) for number in range(6)], 1)
    answer = world.decoded(stored["transfer"], [PROMPTS[-1]])
    assert answer["tokens"] == world.expected[-1:]
    assert answer["counters"]["handoffs_direct"] == 1
    world.give_back()


def test_a_ticket_that_nobody_uses_runs_out(world: World) -> None:
    """The decode engine never came: prefill has its blocks back, and a late ticket costs a computation."""
    stored = world.prefilled()
    world.give_back()
    assert {state for _, state in world.records(stored["transfer"])} == {HandoffState.EXPIRED}
    answer = world.decoded(stored["transfer"])
    assert answer["tokens"] == world.expected
    assert answer["counters"]["handoffs_received"] == answer["counters"]["blocks_loaded"] == 0
    assert answer["counters"]["handoffs_failed"] > 0


def test_tickets_of_other_prompts_load_nothing(world: World) -> None:
    """Mixed up by a proxy, or by somebody who means harm: the keys do not agree, and decode computes."""
    stored = world.prefilled()
    tickets = stored["transfer"]
    answer = world.decoded([*tickets[:-2], tickets[-1], tickets[-2]])
    assert answer["tokens"] == world.expected
    assert answer["counters"]["handoffs_failed"] == 2
    assert answer["counters"]["handoffs_received"] == 2
    world.give_back()


def test_made_up_tickets_are_answered_as_if_there_were_none(world: World) -> None:
    """Whatever a client writes into its request, it gets its answer."""
    (good,) = world.prefilled([PROMPTS[-1]])["transfer"]
    bad = [
        good | {"kvservice_handoff_ids": ["1"]},
        good | {"kvservice_handoff_ids": ["x"]},
        good | {"kvservice_daemon": "00"},
        good | {"kvservice_namespace": "ff" * 32},
        good | {"kvservice_blocks_count": 1 << 31, "kvservice_handoff_ids": ["18446744073709551615"]},
        {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "elsewhere"},
    ]
    answer = world.decoded(bad)
    assert answer["tokens"] == world.expected
    assert answer["counters"]["handoffs_received"] == answer["counters"]["faults"] == 0
    assert answer["counters"]["tickets_refused"] == 3
    world.give_back()


def test_requests_aborted_with_a_ticket_give_it_back(world: World) -> None:
    """Whenever they are aborted, prefill has its blocks before the ticket runs out, and decode its own."""
    for steps in range(4):
        stored = world.prefilled()
        world.decode.reset()
        aborted = world.decode.ask(
            {"op": "abort", "prompts": PROMPTS, "steps": steps, "transfer": stored["transfer"]}
        )
        assert aborted == {"aborted": len(PROMPTS), "left": 0}
        states = {state for _, state in world.records(stored["transfer"])}
        assert states <= {HandoffState.REJECTED, HandoffState.COMPLETED}
        world.give_back()
    stored = world.prefilled()
    assert world.decoded(stored["transfer"])["tokens"] == world.expected


def test_samples_of_one_prompt_need_one_handoff(world: World) -> None:
    """One request spends the ticket; the others compute, or find the blocks in the engine's own cache."""
    stored = world.prefilled([PROMPTS[-1]])
    answer = world.decoded(stored["transfer"] * 3, [PROMPTS[-1]] * 3)
    assert answer["tokens"] == world.expected[-1:] * 3
    assert answer["counters"]["handoffs_direct"] == 1
    world.give_back()


def test_a_daemon_that_dies_costs_no_token_and_its_successor_hands_over_again(world: World) -> None:
    """Tickets of its time are void; the engines find the next one and lend their memory anew."""
    stored = world.prefilled()
    world.daemon.kill()
    answer = world.decoded(stored["transfer"])
    assert answer["tokens"] == world.expected
    assert answer["counters"]["handoffs_received"] == 0
    world.start_daemon()
    for _ in range(100):
        stored = world.prefilled()
        answer = world.decoded(stored["transfer"])
        assert answer["tokens"] == world.expected
        if answer["counters"]["handoffs_direct"] == 4:
            break
    assert answer["counters"]["handoffs_direct"] == 4
