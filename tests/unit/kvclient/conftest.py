"""A fake daemon, a way to connect either flavour, and one namespace to work in."""

import asyncio
import inspect
import tempfile
from pathlib import Path

import numpy as np
import pytest

import kvclient.aio
import kvclient.sync
from kvclient import ClientSettings, Identity, Part, Shape
from tests.unit.kvclient.fake_daemon import FakeDaemon

BLOCK_BYTES = 4096


@pytest.fixture
def daemon():
    """Serve a fake daemon; its socket's path is short, as Unix sockets ask for."""
    with tempfile.TemporaryDirectory() as folder, FakeDaemon(str(Path(folder) / "kv.sock")) as running:
        yield running


@pytest.fixture(params=["sync", "aio"])
def flavour(request):
    """Run the test once for each flavour of the client."""
    with Flavour(request.param) as chosen:
        yield chosen


@pytest.fixture
def identity():
    """Name a small model."""
    return Identity(
        model_id="model", weights_revision="1", layers_count=2, kv_heads_count=2, k_head_dim=8, hash_tokens=16
    )


@pytest.fixture
def part():
    """Declare a part whose blocks have BLOCK_BYTES."""
    return part_of(BLOCK_BYTES)


def part_of(block_bytes, kv_group=0):
    """Declare a part of that block size."""
    shape = Shape(dtype="bfloat16", kv_packing="opaque", block_tokens=16)
    return Part(kv_group=kv_group, layers_count=2, heads_count=2, shape=shape, block_bytes=block_bytes)


def blocks_of(rng, count, block_bytes=BLOCK_BYTES):
    """Draw blocks, (count, block_bytes) uint8."""
    return np.frombuffer(rng.randbytes(count * block_bytes), np.uint8).reshape(count, block_bytes)


def settings_of(daemon, **changes):
    """Settings for a client of the fake daemon that gives up soon."""
    return ClientSettings(endpoint=f"unix:{daemon.path}", **{"call_timeout_s": 5.0, **changes})


class Flavour:
    """Runs calls of either client from a blocking test: `run(client.put(...))`."""

    def __init__(self, name):
        self.name = name
        self.KvClient = kvclient.sync.KvClient if name == "sync" else kvclient.aio.KvClient
        self._loop = None if name == "sync" else asyncio.new_event_loop()
        self._clients = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self._clients:
            self.run(client.close)
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def run(self, call, *arguments, **options):
        """Call a function and, in the aio flavour, wait for what it answers."""
        if self._loop is None:
            return call(*arguments, **options)

        async def waited():
            answer = call(*arguments, **options)
            return await answer if inspect.isawaitable(answer) else answer

        return self._loop.run_until_complete(waited())

    def wait(self, function, *arguments):
        """Call a blocking function while the client's own tasks and threads go on."""
        if self._loop is None:
            return function(*arguments)
        return self.run(asyncio.to_thread, function, *arguments)

    def connect(self, settings):
        """Connect a client, which is closed at the end of the test."""
        client = self.run(self.KvClient.connect, settings)
        self._clients.append(client)
        return client

    def enter(self, context):
        """Enter a context of this flavour."""
        return self.run(context.__aenter__ if self._loop else context.__enter__)

    def leave(self, context):
        """Leave a context of this flavour without an error."""
        return self.run(context.__aexit__ if self._loop else context.__exit__, None, None, None)
