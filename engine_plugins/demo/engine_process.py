"""One vLLM engine, driven by JSON lines on standard input; answers go to the file descriptor of --answers.

    {"op": "generate", "prompts": [[ids]], "max_tokens": 8, "salt": "", "transfer": [{...}]}
        -> {"tokens": [[ids]], "finish": ["length"], "seconds": 0.1, "transfer": [{...}],
            "preemptions": 0, "sources": {...}, "counters": {...}}
    {"op": "settle", "timeout_s": 10} -> {"left": 0}    makes steps until vLLM holds no request's blocks
    {"op": "reset", "service": false} -> {"reset": true}    forgets the engine's own prefix cache, or all
    {"op": "abort", "prompts": [[ids]], "steps": 1} -> {"aborted": 1, "left": 0}    aborts after some steps
    {"op": "quit"} -> {"ended": true}

`transfer` are the requests' kv_transfer_params, and those that come back. `sources` are vLLM's own counters:
prompt tokens computed, found in its own cache, or loaded from outside. `counters` are the plugin's. Both are
what this one call added.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

ABORT_TIMEOUT_S = 30.0
SOURCES = "vllm:prompt_tokens_by_source"
PREEMPTIONS = "vllm:num_preemptions"


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        options: dict[str, Any] = json.loads(arguments.options)
        if arguments.transfer:
            options["kv_transfer_config"] = KVTransferConfig(**json.loads(arguments.transfer))
        self._llm = LLM(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=2048,
            block_size=arguments.block_tokens,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_num_seqs=8,
            max_num_batched_tokens=arguments.step_tokens,
            seed=0,
            disable_log_stats=False,
            kv_cache_memory_bytes=arguments.kv_bytes,
            **options,
        )

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer prompts greedily, and say where their KV came from."""
        sources, counters, preemptions = self._sources(), self._counters(), self._preemptions()
        begin = time.monotonic()
        prompts = self._prompts(command)
        sampling = [
            self._sampling(command["max_tokens"], params)
            for params in command.get("transfer") or [None] * len(prompts)
        ]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
            "seconds": time.monotonic() - begin,
            "transfer": [output.kv_transfer_params for output in outputs],
            "preemptions": self._preemptions() - preemptions,
            "sources": difference(self._sources(), sources),
            "counters": difference(self._counters(), counters),
        }

    def abort(self, command: dict[str, Any]) -> dict[str, Any]:
        """Begin prompts, abort them after some steps, and run until nothing is left of them."""
        engine = self._llm.llm_engine
        names = []
        for number, prompt in enumerate(self._prompts(command)):
            names.append(f"abort-{time.monotonic_ns()}-{number}")
            params = command["transfer"][number] if command.get("transfer") else None
            engine.add_request(names[-1], prompt, self._sampling(command.get("max_tokens", 64), params))
        for _ in range(command["steps"]):
            engine.step()
        engine.abort_request(names)
        return {"aborted": len(names), **self.settle({"timeout_s": ABORT_TIMEOUT_S})}

    def settle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Make steps, as a server's engine does by itself, until no request is left.

        vLLM's front end has forgotten them; its scheduler keeps their blocks until their loads have ended, or
        until others have read what was handed over.
        """
        scheduler = self._scheduler()
        until = time.monotonic() + command["timeout_s"]
        while scheduler.requests and time.monotonic() < until:
            self._llm.llm_engine.step()
        return {"left": len(scheduler.requests)}

    def reset(self, command: dict[str, Any]) -> dict[str, Any]:
        """Forget the engine's own prefix cache, or also what the service has."""
        return {"reset": self._llm.reset_prefix_cache(reset_connector=command.get("service", False))}

    def close(self) -> None:
        """Shut the connectors down, as a server does when it stops."""
        for connector in self._connectors():
            connector.shutdown()

    def _prompts(self, command: dict[str, Any]) -> list[Any]:
        salt = {"cache_salt": command["salt"]} if command.get("salt") else {}
        return [{"prompt_token_ids": ids, **salt} for ids in command["prompts"]]

    def _sampling(self, max_tokens: int, transfer: dict[str, Any] | None = None) -> Any:
        return SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )

    def _sources(self) -> dict[str, float]:
        metrics = self._llm.get_metrics()
        return {metric.labels["source"]: metric.value for metric in metrics if metric.name == SOURCES}

    def _preemptions(self) -> float:
        return sum(metric.value for metric in self._llm.get_metrics() if metric.name == PREEMPTIONS)

    def _counters(self) -> dict[str, float]:
        counts: dict[str, float] = {}
        for connector in self._connectors():
            for name, count in connector.counters().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _connectors(self) -> list[Any]:
        """Return the connector of the scheduler and that of the worker; both live in this process."""
        found = [self._scheduler().get_kv_connector()]
        if has_kv_transfer_group():
            found.append(get_kv_transfer_group())
        return [connector for connector in found if connector is not None]


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return what has been added."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def main() -> None:
    """Make the engine and serve until told to quit, or until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--answers", type=int, required=True, help="file descriptor for the answers")
    parser.add_argument("--transfer", default="", help="vLLM's kv-transfer-config, as JSON")
    parser.add_argument("--options", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-tokens", type=int, default=32)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--kv-bytes", type=int, default=64 << 20)
    arguments = parser.parse_args()
    begin = time.monotonic()
    with os.fdopen(arguments.answers, "w", buffering=1) as answers:
        engine = Engine(arguments)
        answers.write(json.dumps({"ready": True, "seconds": time.monotonic() - begin}) + "\n")
        operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "generate": engine.generate,
            "abort": engine.abort,
            "reset": engine.reset,
            "settle": engine.settle,
        }
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "quit":
                break
            answers.write(json.dumps(operations[command["op"]](command)) + "\n")
        engine.close()
        answers.write(json.dumps({"ended": True}) + "\n")


if __name__ == "__main__":
    main()
