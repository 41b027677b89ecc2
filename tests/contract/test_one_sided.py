"""The contract of one-sided reads, over each transport."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvservice.core.engine_memory import EngineSegment, MemoryKind, SegmentWay
from kvservice.core.errors import InvalidFieldError, PeerUnavailableError
from kvservice.transports.inproc_memory import InprocMemoryHub
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx import UcxEndpoint, why_not
from tests.contract.one_sided_contract import (
    Harness,
    OneSidedContract,
    Reading,
    RevokingContract,
    whole,
)
from tests.contract.one_sided_memory import SEGMENT_SIZES_BYTES, content


class InprocLender:
    """Another endpoint of this process."""

    def __init__(self, hub: InprocMemoryHub, seed: int) -> None:
        self._endpoint = hub.endpoint()
        self._memory = [content(seed, index) for index in range(len(SEGMENT_SIZES_BYTES))]
        self._lent = [
            self._endpoint.lend(one.ctypes.data, one.nbytes, MemoryKind.HOST) for one in self._memory
        ]
        self.segments = tuple(
            EngineSegment(one.ctypes.data, one.nbytes, MemoryKind.HOST, lent.ways)
            for one, lent in zip(self._memory, self._lent, strict=True)
        )

    def take_back(self, index: int) -> None:
        """Lend one segment no more."""
        self._lent[index].close()

    def end(self) -> None:
        """Be gone; the memory with it."""
        self._endpoint.close()
        for one in self._memory:
            one[:] = 0


class TestInproc(RevokingContract):
    """The endpoint within one process."""

    @pytest.fixture
    def harness(self):
        hub = InprocMemoryHub()
        endpoint = hub.endpoint()
        lenders = []

        def start(seed: int) -> InprocLender:
            lenders.append(InprocLender(hub, seed))
            return lenders[-1]

        yield Harness(endpoint, start)
        endpoint.close()
        for lender in lenders:
            lender.end()

    def test_memory_of_a_device_is_not_lent(self, harness):
        """A copy by the processor would crash on it."""
        with pytest.raises(InvalidFieldError, match="host only"):
            harness.endpoint.lend(1 << 20, 4096, MemoryKind.CUDA)

    def test_memory_that_was_lent_as_another_is_not_read(self, harness):
        """A number that names something else by now is as good as gone."""
        lender, reading = harness.start(1), Reading([whole(1)])
        for changes in ({"base_address": 4096}, {"size_bytes": SEGMENT_SIZES_BYTES[1] + 1}):
            segments = tuple(replace(one, **changes) for one in lender.segments)
            with pytest.raises(PeerUnavailableError):
                harness.endpoint.read(reading.of(segments))
        assert reading.is_untouched

    def test_lending_for_ever_keeps_nothing(self, harness):
        """What was taken back is forgotten by the endpoint as well."""
        memory = np.zeros(4096, np.uint8)
        for _ in range(1000):
            harness.endpoint.lend(memory.ctypes.data, memory.nbytes, MemoryKind.HOST).close()
        assert harness.endpoint.lent_count == 0


class UcxLender:
    """Another process."""

    def __init__(self, seed: int, devices: str, chunk_bytes: int) -> None:
        script = Path(__file__).with_name("ucx_lender.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(seed), devices, str(chunk_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.segments = tuple(
            EngineSegment(
                address,
                size_bytes,
                MemoryKind.HOST,
                tuple(SegmentWay(name, bytes.fromhex(peer), bytes.fromhex(key)) for name, peer, key in ways),
            )
            for address, size_bytes, ways in json.loads(self._process.stdout.readline())
        )

    def take_back(self, index: int) -> None:
        """Lend one segment no more."""
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "taken back\n"

    def end(self) -> None:
        """Be gone."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.mark.skipif(bool(why_not(EndpointSettings())), reason=why_not(EndpointSettings()))
class TestUcx(OneSidedContract):
    """UCX between processes, by CMA; over one lane, and over two with segments in several registrations."""

    @pytest.fixture(params=[("lo", 0), ("lo;lo", 32 << 10)], ids=["a lane", "two lanes, in chunks"])
    def harness(self, request):
        devices, chunk_bytes = request.param
        endpoint, lenders = UcxEndpoint(EndpointSettings(devices=devices)), []

        def start(seed: int) -> UcxLender:
            lenders.append(UcxLender(seed, devices, chunk_bytes))
            return lenders[-1]

        yield Harness(endpoint, start)
        endpoint.close()
        for lender in lenders:
            lender.end()
