import asyncio
import os
from types import SimpleNamespace

from kvservice.service.credentials import Credentials
from kvservice.service.lane_server import LaneServer


class GoneConnection:
    """A connection whose peer has hung up: the first push finds out, and closes it."""

    def __init__(self, server, token):
        self.server = server
        self.caller = SimpleNamespace(token=token)
        self.process = SimpleNamespace(pidfd=os.pidfd_open(os.getpid()))
        self.pushed = 0

    def push(self, _):
        """Take a frame, in vain."""
        self.pushed += 1
        self.server.connection_closed(self)


def test_a_client_that_has_hung_up_does_not_stop_the_drain():
    """Telling the sessions of the stop once failed when a connection was found gone in the middle of it,
    and the daemon then ended without draining.
    """

    async def drain():
        server = LaneServer(
            dispatcher=None, coordinator=None, arena=None, credentials=Credentials({}, {}), feed=None
        )
        connections = [GoneConnection(server, bytes([number]) * 16) for number in range(3)]
        for connection in connections:
            server.session_attached(connection, connection.caller.token)
        server.announce_drain()
        for connection in connections:
            server.session_ended(connection.caller.token)
            os.close(connection.process.pidfd)
        return [connection.pushed for connection in connections]

    assert asyncio.run(drain()) == [1, 1, 1]
