"""Prefill here, decode there, and the KV between them through one daemon: `main_job.py [--vllm PYTHON]`.

The engines are real vLLM: of the Python that --vllm names (or its virtual environment), else of `.venv-vllm`
in this project, which is made or mended first. The tokens of prefill + decode must equal those of one engine
alone, and blocks must have been loaded: otherwise the exit status is 1. Two controls follow: stored bytes
that are altered must be refused, and an engine that does not check them must answer otherwise, which shows
that it is the loaded bytes that decode uses.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_env
from processes import HERE, Daemon, Engine, ProcessFailed, transfer_config, vllm_engine
from stored_bytes import alter

ANSWER_TOKENS = 24
CAPACITY_BYTES = 256 << 20
SEGMENT_BYTES = 64 << 20
MODEL_TIMEOUT_S = 180
BLOCK_TOKENS = 32
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-vllm"

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what it is an example of."""

    what: str
    tokens: list[int]


def prompts() -> list[Prompt]:
    """Return the prompts: every way to lie against the block's border, a long one, and a shared prefix."""
    rng = random.Random(20)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(count)]

    long = drawn(1000)
    return [
        Prompt("shorter than a block", drawn(BLOCK_TOKENS - 1)),
        Prompt("one block", drawn(BLOCK_TOKENS)),
        Prompt("two blocks", drawn(2 * BLOCK_TOKENS)),
        Prompt("two blocks and a token", drawn(2 * BLOCK_TOKENS + 1)),
        Prompt("an odd length", drawn(317)),
        Prompt("long", long),
        Prompt("half of that, then other", long[:512] + drawn(100)),
    ]


class Job:
    """One run, with all its processes."""

    def __init__(self, python: Path, folder: Path, stack: ExitStack) -> None:
        self._python = python
        self._folder = folder
        self._stack = stack
        self._model = folder / "model"
        self.failures: list[str] = []

    def run(self) -> None:
        """Run the passage and its controls."""
        given = prompts()
        daemon = self._start_daemon()
        say("writing a small random Llama")
        write_model(self._python, self._model)
        plain = self._answers(self._engine("plain", daemon), given, ANSWER_TOKENS)
        prefill = self._answers(self._engine("prefill", daemon), given, 1)
        decode_engine = self._engine("decode", daemon)
        decode = self._answers(decode_engine, given, ANSWER_TOKENS)
        show(given, plain, prefill, decode)
        self._check("prefill's first tokens are those of one engine alone", heads(prefill) == heads(plain))
        self._check("decode's tokens are those of one engine alone", tokens(decode) == tokens(plain))
        self._check("blocks were loaded", total(decode, "blocks_loaded") > 0)
        self._check("no block was lost", total(decode, "blocks_lost") == 0)
        self._controls(daemon, decode_engine, given, plain)

    def _controls(self, daemon: Daemon, decode_engine: Engine, given: list[Prompt], plain: list[Row]) -> None:
        count = alter(daemon.process.pid, segment_bytes=SEGMENT_BYTES)
        say(f"altered the stored bytes in {count} segments")
        decode_engine.reset()
        careless = self._answers(self._engine("careless", daemon), given, ANSWER_TOKENS)
        refused = self._answers(decode_engine, given, ANSWER_TOKENS)
        self._check(
            f"altered blocks are refused by their checksum ({total(refused, 'blocks_lost')} refused, "
            f"{total(refused, 'blocks_loaded')} loaded) and computed: tokens are equal",
            tokens(refused) == tokens(plain)
            and total(refused, "blocks_loaded") == 0
            and total(refused, "blocks_lost") > 0,
        )
        loaded_count = total(careless, "blocks_loaded")
        differing = sum(one != other for one, other in zip(tokens(careless), tokens(plain), strict=True))
        self._check(
            f"an engine that does not check loads them ({loaded_count} blocks) and answers {differing} of "
            f"{len(given)} prompts otherwise",
            loaded_count > 0 and differing > 0,
        )

    def _start_daemon(self) -> Daemon:
        say("starting the daemon")
        daemon = Daemon(
            self._folder / "kv.sock", self._folder, capacity_bytes=CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES
        )
        return self._stack.enter_context(daemon)

    def _engine(self, name: str, daemon: Daemon) -> Engine:
        """Start an engine by its part in the play."""
        say(f"starting the {name} engine")
        begin = time.monotonic()
        role = {"plain": "", "prefill": "kv_producer"}.get(name, "kv_consumer")
        is_careless = name == "careless"
        transfer = transfer_config(role, daemon.endpoint, verify=not is_careless) if role else None
        engine = vllm_engine(name, self._python, self._model, self._folder, transfer=transfer)
        self._stack.enter_context(engine)
        say(f"the {name} engine is ready after {time.monotonic() - begin:.1f} s")
        return engine

    def _answers(self, engine: Engine, given: list[Prompt], count: int) -> list[Row]:
        """Answer the prompts one by one, so that the counters are those of each."""
        rows = [engine.generate([prompt.tokens], count) for prompt in given]
        say(f"{engine.name} has answered {len(rows)} prompts in {sum(row['seconds'] for row in rows):.2f} s")
        return rows

    def _check(self, what: str, holds: bool) -> None:  # noqa: FBT001 - reads as a sentence and its truth
        print(f"{'PASS' if holds else 'FAIL'}  {what}", flush=True)
        if not holds:
            self.failures.append(what)


def write_model(python: Path, folder: Path) -> None:
    """Write the model, in vLLM's environment."""
    subprocess.run(
        [str(python), str(HERE / "tiny_llama.py"), str(folder)], check=True, timeout=MODEL_TIMEOUT_S
    )


def tokens(rows: list[Row]) -> list[list[int]]:
    """Return what was answered to each prompt."""
    return [row["tokens"][0] for row in rows]


def heads(rows: list[Row]) -> list[int]:
    """Return the first token of each answer."""
    return [answer[0] for answer in tokens(rows)]


def total(rows: list[Row], counter: str) -> int:
    """Add up one of the plugin's counters."""
    return int(sum(row["counters"].get(counter, 0) for row in rows))


def show(given: list[Prompt], plain: list[Row], prefill: list[Row], decode: list[Row]) -> None:
    """Print the table. Tokens by source are the engine's own count, blocks and bytes the plugin's."""
    head = f"{'prompt':<26}{'tokens':>7}{'equal':>7}{'loaded':>8}{'cached':>8}{'computed':>10}"
    head += f"{'stored':>8}{'blocks':>8}{'MiB':>7}{'alone ms':>10}{'decode ms':>11}"
    print(f"\n{head}\n{'-' * len(head)}")
    for prompt, alone, stored, row in zip(given, plain, prefill, decode, strict=True):
        sources, counters = row["sources"], row["counters"]
        is_equal = "yes" if row["tokens"] == alone["tokens"] else "NO"
        print(
            f"{prompt.what:<26}{len(prompt.tokens):>7}{is_equal:>7}"
            f"{sources['external_kv_transfer']:>8.0f}{sources['local_cache_hit']:>8.0f}"
            f"{sources['local_compute']:>10.0f}{stored['counters']['blocks_saved']:>8.0f}"
            f"{counters['blocks_loaded']:>8.0f}{counters['bytes_loaded'] / 2**20:>7.2f}"
            f"{alone['seconds'] * 1e3:>10.1f}{row['seconds'] * 1e3:>11.1f}"
        )
    print("loaded, cached, computed: prompt tokens by source, as decode counts them\n", flush=True)


def say(what: str) -> None:
    """Tell the reader how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


def python_of(path: Path) -> Path:
    """Return the Python of a virtual environment, or the path itself."""
    # Not resolved: through its link alone a virtual environment's Python knows where it belongs.
    python = (path / "bin" / "python" if path.is_dir() else path).absolute()
    if not python.is_file():
        sys.exit(f"main_job: no Python at {python}; build one with engine_plugins/demo/vllm_env.py")
    return python


def main() -> int:
    """Run the job; say what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="a Python with vLLM, or its virtual environment")
    arguments = parser.parse_args()
    if arguments.vllm is None:
        try:
            vllm_env.build(ENVIRONMENT)
        except vllm_env.Failed as failure:
            print(f"main_job: there is no vLLM here: {failure}", file=sys.stderr)
            return 1
    python = python_of(arguments.vllm or ENVIRONMENT)
    begin = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-demo-")))
        job = Job(python, folder, stack)
        try:
            job.run()
        except ProcessFailed as failure:
            print(f"main_job: {failure}", file=sys.stderr)
            return 1
    print(f"{'FAILED' if job.failures else 'all passed'} after {time.monotonic() - begin:.0f} s")
    return 1 if job.failures else 0


if __name__ == "__main__":
    sys.exit(main())
