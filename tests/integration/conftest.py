"""Daemons and clients of the tests here; none outlives its test."""

from __future__ import annotations

import hashlib

import pytest

from tests.integration.daemon_process import ChildClient, DaemonProcess


@pytest.fixture
def start_daemon(tmp_path):
    """Return a way to start daemons."""
    daemons = []

    def start(**options) -> DaemonProcess:
        folder = options.pop("folder", tmp_path)
        folder.mkdir(exist_ok=True)
        daemons.append(DaemonProcess(folder, **options))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.kill()


@pytest.fixture
def daemon(start_daemon):
    """A daemon with 16 MiB in segments of 1 MiB."""
    return start_daemon()


@pytest.fixture
def start_child():
    """Return a way to start clients as processes."""
    children = []

    def start(*arguments: str) -> ChildClient:
        children.append(ChildClient(*arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory):
    """A daemon for all tests of a file, which keep apart by their salts."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("shared"))
    yield daemon
    daemon.kill()


@pytest.fixture
def salt(request) -> bytes:
    """Bytes that no other test has."""
    return hashlib.sha256(request.node.nodeid.encode()).digest()
