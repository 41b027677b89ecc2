"""Workers, peers and lanes for the tests of the UCX binding."""

import contextlib

import pytest

from kvservice.native import ucx
from tests.integration.ucx.peers import LANES, Lane, RemotePeer, Server


@pytest.fixture(scope="session")
def library():
    """Load UCX, or skip: without headers, compiler or library there is nothing to test."""
    reason = ucx.why_not()
    if reason:
        pytest.skip(reason)
    try:
        ucx.load()
    except ucx.UcxUnavailableError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def open_worker(library):
    """Open workers that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda settings: stack.enter_context(ucx.Worker(settings))


@pytest.fixture
def start_peer(library):
    """Start peers that are ended after the test."""
    peers = []

    def start(*args, **more):
        peers.append(RemotePeer(*args, **more))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture
def serve():
    """Serve workers until the test ends."""
    servers = []

    def start(worker):
        servers.append(Server(worker))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def shared_peers(library):
    """Give one peer for each lane, for tests that leave it as it was: starting one takes half a second."""
    peers = {name: RemotePeer(settings) for name, (settings, _) in LANES.items()}
    yield peers
    for peer in peers.values():
        peer.end()


@pytest.fixture(params=LANES)
def lane(request, open_worker, shared_peers):
    """Give a worker and a wired endpoint to a peer with 4 MiB, over each lane. The peer is others' too."""
    settings, is_watched = LANES[request.param]
    peer = shared_peers[request.param]
    peer.ask("reset")
    return Lane(open_worker(settings), peer, is_watched=is_watched)


@pytest.fixture(params=LANES)
def mortal_lane(request, open_worker, start_peer):
    """Give the same to a peer that the test may kill."""
    settings, is_watched = LANES[request.param]
    return Lane(open_worker(settings), start_peer(settings), is_watched=is_watched)
