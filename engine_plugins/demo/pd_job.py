"""Prefill in one vLLM server, decode in another, and the KV straight from engine to engine: `pd_job.py
[--vllm PYTHON]`.

A daemon, two OpenAI servers on a small random Llama, and a proxy that pairs them. Each prompt is first
answered by the decode server alone, under another salt, so that nothing of it is found later; then through
the proxy. The exit status is 1 if an answer differs, if the daemon's record of a handoff says anything but
DIRECT and COMPLETED, or if the prefill server does not have all its blocks back at the end.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import vllm_env
from main_job import ENVIRONMENT, python_of, say, write_model
from processes import SOURCE_FOLDERS, Daemon, ProcessFailed, transfer_config
from servers import BLOCK_TOKENS, Answer, Server, proxy_server, vllm_server

sys.path[:0] = [str(folder) for folder in SOURCE_FOLDERS]

from kvclient import ClientSettings, HandoffChoice, HandoffState  # noqa: E402 - needs the path
from kvclient.sync import KvClient  # noqa: E402 - likewise

ANSWER_TOKENS = 16
LONG_TOKENS = 1500
CAPACITY_BYTES = 64 << 20
SEGMENT_BYTES = 16 << 20
SETTLE_TIMEOUT_S = 30.0
POLL_S = 0.05

SOURCES = ("external_kv_transfer", "local_cache_hit", "local_compute")
BYTES = "vllm:kvservice_bytes_handed_over_total"
OFFERED = "vllm:kvservice_handoffs_offered_total"
RELEASED = "vllm:kvservice_handoffs_released_total"
USAGE = "vllm:kv_cache_usage_perc"

# Two cores, and four processes that import: what takes milliseconds elsewhere may take a second here.
PATIENCE = {"lookup_timeout_ms": 2_000, "transfer_timeout_ms": 5_000}


@dataclass(frozen=True)
class Row:
    """One prompt: its answers, the daemon's record of its handoff, and what decode counted for it."""

    what: str
    tokens_count: int
    alone: Answer
    paired: Answer
    record: str
    is_direct: bool
    counted: dict[str, float]

    @property
    def is_equal(self) -> bool:
        """Whether both answers are the same."""
        return (self.paired.tokens, self.paired.text) == (self.alone.tokens, self.alone.text)

    @property
    def whole_blocks(self) -> int:
        """Blocks that can be handed over and used: the last token is computed where it is decoded."""
        return (self.tokens_count - 1) // BLOCK_TOKENS


def prompts() -> dict[str, list[int]]:
    """Return the prompts by what they are an example of."""
    rng = random.Random(21)
    counts = {
        "shorter than a block": BLOCK_TOKENS - 1,
        "two blocks": 2 * BLOCK_TOKENS,
        "two blocks and a token": 2 * BLOCK_TOKENS + 1,
        "an odd length": 317,
        "long": LONG_TOKENS,
    }
    return {what: [rng.randrange(3, 1000) for _ in range(count)] for what, count in counts.items()}


def warm_up(count: int) -> list[int]:
    """Return a prompt that is none of the others."""
    rng = random.Random(count)
    return [rng.randrange(3, 1000) for _ in range(count)]


class PairJob:
    """One run, with all its processes."""

    def __init__(self, python: Path, folder: Path, stack: ExitStack) -> None:
        self._python = python
        self._folder = folder
        self._stack = stack
        self._model = folder / "model"
        self.failures: list[str] = []

    def run(self) -> None:
        """Answer every prompt twice, and compare."""
        say("starting the daemon")
        daemon = self._stack.enter_context(
            Daemon(
                self._folder / "kv.sock",
                self._folder,
                capacity_bytes=CAPACITY_BYTES,
                segment_bytes=SEGMENT_BYTES,
            )
        )
        say("writing a small random Llama")
        write_model(self._python, self._model)
        decode = self._server("decode", daemon)
        given = prompts()
        alone = {what: decode.complete(ids, ANSWER_TOKENS, cache_salt="alone") for what, ids in given.items()}
        say(f"decode has answered {len(alone)} prompts alone")
        prefill = self._server("prefill", daemon)
        proxy = self._stack.enter_context(
            proxy_server(self._python, self._folder, prefill=prefill, decode=decode)
        )
        say(f"the proxy listens at {proxy.url}")
        # The first read of another engine's memory makes the connection; the table is of those that follow.
        proxy.complete(warm_up(2 * BLOCK_TOKENS + 1), 2)
        settings = ClientSettings(endpoint=daemon.endpoint, client_name="pd_job")
        client = self._stack.enter_context(KvClient.connect(settings))
        rows = [self._paired(what, ids, alone[what], proxy, decode, client) for what, ids in given.items()]
        show(rows)
        self._judge(rows)
        self._check_stream(proxy, alone["an odd length"], given["an odd length"])
        self._check_memory(prefill)
        self._check_without_prefill(prefill, proxy, decode)

    def _server(self, name: str, daemon: Daemon) -> Server:
        say(f"starting the {name} server (half a minute)")
        begin = time.monotonic()
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[name]
        # Nothing is stored: what decode does not compute has come from prefill's memory.
        transfer = transfer_config(role, daemon.endpoint, handoff="direct", save_handed_off=False, **PATIENCE)
        server = vllm_server(name, self._python, self._model, self._folder, transfer=transfer)
        self._stack.enter_context(server)
        say(f"the {name} server is ready at {server.url} after {time.monotonic() - begin:.0f} s")
        server.complete(warm_up(LONG_TOKENS), 2, cache_salt="warm up")
        return server

    def _paired(
        self, what: str, ids: list[int], alone: Answer, proxy: Server, decode: Server, client: KvClient
    ) -> Row:
        """Answer one prompt through the proxy, and collect what is known of its way."""
        before = decode.metrics()
        answer = proxy.complete(ids, ANSWER_TOKENS)
        counted: dict[str, float] = {}

        def is_counted() -> bool:
            after = decode.metrics()
            counted.update({name: value - before.get(name, 0.0) for name, value in after.items()})
            return sum(tokens_from(counted, source) for source in SOURCES) >= len(ids)

        self._wait(is_counted, f"decode counts the prompt ({what})")
        record, is_direct = "none", False
        for handoff_id in filter(None, answer.headers.get("x-kv-handoffs", "").split(",")):
            found = client.handoffs.look(int(handoff_id))
            choice, state = HandoffChoice(found.choice), HandoffState(found.state)
            record = f"{choice.name} {state.name}"
            is_direct = (choice, state) == (HandoffChoice.DIRECT, HandoffState.COMPLETED)
        say(f"{what}: {record}")
        return Row(what, len(ids), alone, answer, record, is_direct, counted)

    def _judge(self, rows: list[Row]) -> None:
        long_enough = [row for row in rows if row.whole_blocks]
        self._check("every answer is that of decode alone", all(row.is_equal for row in rows))
        self._check(
            "every prompt with a whole block went direct, by the daemon's record",
            all(row.is_direct for row in long_enough),
        )
        self._check(
            "all their whole blocks were loaded, and only the rest computed, by vLLM's count",
            all(
                tokens_from(row.counted, "external_kv_transfer") == row.whole_blocks * BLOCK_TOKENS
                for row in rows
            ),
        )
        self._check("bytes were pulled", sum(row.counted.get(BYTES, 0.0) for row in rows) > 0)

    def _check_stream(self, proxy: Server, alone: Answer, ids: list[int]) -> None:
        text, pieces_count = proxy.stream(ids, ANSWER_TOKENS)
        self._check(
            f"a streamed answer comes in pieces ({pieces_count}) and is the same",
            text == alone.text and pieces_count > 1,
        )

    def _check_memory(self, prefill: Server) -> None:
        """The prefill engine is idle: it must get its blocks back without another request."""

        def is_free() -> bool:
            found = prefill.metrics()
            return found[USAGE] == 0 and found.get(OFFERED, 0) == found.get(RELEASED, 0) > 0

        is_so = self._wait(is_free, "prefill has its blocks back")
        found = prefill.metrics()
        self._check(
            f"prefill has the blocks of all {found.get(OFFERED, 0):.0f} handoffs back, and uses "
            f"{found[USAGE]:.0%} of its KV memory",
            is_so,
        )

    def _check_without_prefill(self, prefill: Server, proxy: Server, decode: Server) -> None:
        say("stopping the prefill server")
        prefill.stop()
        ids = [7 + number for number in range(100)]
        expected = decode.complete(ids, ANSWER_TOKENS, cache_salt="alone")
        answer = proxy.complete(ids, ANSWER_TOKENS)
        self._check("without prefill, decode computes and answers the same", answer.tokens == expected.tokens)

    def _wait(self, is_so: Callable[[], bool], what: str) -> bool:
        until = time.monotonic() + SETTLE_TIMEOUT_S
        while not is_so():
            if time.monotonic() > until:
                say(f"not within {SETTLE_TIMEOUT_S:.0f} s: {what}")
                return False
            time.sleep(POLL_S)
        return True

    def _check(self, what: str, holds: bool) -> None:  # noqa: FBT001 - reads as a sentence and its truth
        print(f"{'PASS' if holds else 'FAIL'}  {what}", flush=True)
        if not holds:
            self.failures.append(what)


def tokens_from(counted: dict[str, float], source: str) -> float:
    """Return the prompt tokens of a source, as vLLM counts them."""
    return counted.get(f"vllm:prompt_tokens_by_source_total:{source}", 0.0)


def show(rows: list[Row]) -> None:
    """Print the table. Tokens by source are the engine's own count, bytes the plugin's."""
    head = f"{'prompt':<24}{'tokens':>7}{'equal':>7}  {'record of the handoff':<22}{'handed over':>12}"
    head += f"{'cached':>8}{'computed':>10}{'MiB pulled':>12}{'alone ms':>10}{'paired ms':>11}"
    print(f"\n{head}\n{'-' * len(head)}")
    for row in rows:
        handed, cached, computed = (tokens_from(row.counted, source) for source in SOURCES)
        print(
            f"{row.what:<24}{row.tokens_count:>7}{'yes' if row.is_equal else 'NO':>7}  {row.record:<22}"
            f"{handed:>12.0f}{cached:>8.0f}{computed:>10.0f}{row.counted.get(BYTES, 0.0) / 2**20:>12.2f}"
            f"{row.alone.seconds * 1e3:>10.1f}{row.paired.seconds * 1e3:>11.1f}"
        )
    print("handed over, cached, computed: prompt tokens by source, as decode counts them\n", flush=True)


def main() -> int:
    """Run the job; say what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="a Python with vLLM, or its virtual environment")
    arguments = parser.parse_args()
    if arguments.vllm is None:
        try:
            vllm_env.build(ENVIRONMENT)
        except vllm_env.Failed as failure:
            print(f"pd_job: there is no vLLM here: {failure}", file=sys.stderr)
            return 1
    python = python_of(arguments.vllm or ENVIRONMENT)
    # The processes end with the stack below, also when this one is told to end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    begin = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-pd-")))
        job = PairJob(python, folder, stack)
        try:
            job.run()
        except ProcessFailed as failure:
            print(f"pd_job: {failure}", file=sys.stderr)
            return 1
    print(f"{'FAILED' if job.failures else 'all passed'} after {time.monotonic() - begin:.0f} s")
    return 1 if job.failures else 0


if __name__ == "__main__":
    sys.exit(main())
