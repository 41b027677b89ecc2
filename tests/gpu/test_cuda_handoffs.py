"""Blocks of CUDA tensors, from one process's device memory to another's. Needs a GPU: `make test-gpu`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient import BlockPool, ClientSettings, HandoffChoice
from kvclient.sync import KvClient
from tests.integration.daemon_process import DaemonProcess

torch = pytest.importorskip("torch")

from tests.gpu.cuda_engine import BLOCKS, ON_DEVICE, block_of, open_namespace  # noqa: E402 - it imports torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.fixture
def daemon(tmp_path):
    """A daemon on this host."""
    daemon = DaemonProcess(tmp_path)
    yield daemon
    daemon.kill()


@pytest.fixture
def giver(daemon):
    """Another process, which lends blocks of its device memory and offers some with each line."""
    script = Path(__file__).with_name("cuda_engine.py")
    process = subprocess.Popen(
        [sys.executable, str(script), daemon.lane], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            stream.close()


@pytest.fixture
def taker(daemon):
    """A client of another engine, with a pool of its own device memory."""
    with KvClient.connect(
        ClientSettings(daemon.lane, engine_incarnation=os.urandom(16), one_sided=ON_DEVICE)
    ) as client:
        yield client


def offered(giver, verb: str) -> int:
    """Let the other process offer all of its blocks."""
    giver.stdin.write(verb + "\n")
    giver.stdin.flush()
    return int(giver.stdout.readline())


@pytest.mark.parametrize("verb", ["offer", "offer what is still being computed"])
def test_device_memory_goes_to_device_memory(giver, taker, verb):
    """Directly, and only when the stream that computes the blocks has come so far."""
    memory = torch.zeros_like(torch.stack([block_of(index) for index in range(BLOCKS)]))
    handoff_id = offered(giver, verb)
    received = taker.handoffs.receive(
        open_namespace(taker), handoff_id, [BlockPool.of([memory])], range(BLOCKS)
    )
    torch.cuda.synchronize()
    assert received.choice is HandoffChoice.DIRECT
    for index in range(BLOCKS):
        assert torch.equal(memory[index], block_of(index))
