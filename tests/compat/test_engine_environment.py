"""Engines pin their own grpcio and protobuf: the client works under those of vLLM, against our daemon."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.daemon_process import ROOT, DaemonProcess, plain_environment

ENGINE_PYTHON = ROOT / ".venv-vllm/bin/python"


@pytest.fixture
def daemon(tmp_path):
    """A daemon of our own environment."""
    daemon = DaemonProcess(tmp_path)
    yield daemon
    daemon.kill()


@pytest.mark.vllm
@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="the vLLM environment was not built")
def test_the_client_works_in_the_environment_of_vllm(daemon):
    """Import, put, get and lease, both flavours, both ways, under grpcio 1.85 and protobuf 7."""
    environment = plain_environment()
    environment["PYTHONPATH"] = ":".join(str(ROOT / folder) for folder in (".", "client", "protos"))
    child = Path(__file__).with_name("engine_child.py")
    done = subprocess.run(
        [ENGINE_PYTHON, "-W", "error::UserWarning:google", child, daemon.lane, daemon.grpc],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert tuple(map(int, report["grpc"].split(".")[:2])) >= (1, 85)
    assert int(report["protobuf"].split(".")[0]) >= 7
    assert Path(report["kvclient"]).is_relative_to(ROOT)
    for name in ("lane", "remote", "aio_lane", "aio_remote", "has_stub"):
        assert report[name] is True, report
    assert report["tensors"] in {"same", "no torch"}
    assert report["bytes"] == "0a0301ac02"
