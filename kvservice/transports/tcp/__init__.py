"""The tcp data plane: plain sockets, scatter and gather straight from and to the blocks.

For everywhere else than one host, and wherever the peer is not trusted: the side
that has the bytes checks the capability before and after each transfer.

A connection carries one transfer at a time; frames as in
`kvservice.transports.frames`, messages as in `local_lane.proto`, payload raw:

    read    client                          server
            REQUEST READ_SLOTS         ->
                                       <-   RESPONSE payload_bytes, checksums | ERROR
                                       <-   payload
                                       <-   RESPONSE (the lease still holds) | ERROR

    write   REQUEST WRITE_SLOTS        ->
                                       <-   RESPONSE payload_bytes: go ahead | ERROR
            payload                    ->
                                       <-   RESPONSE checksums as received | ERROR

The go-ahead costs a write half a round trip, and buys that a refused write never
has payload in flight: nobody must drain gigabytes to keep a connection, and the
two ends can never both wait for the other to read. An error found before the
payload keeps the connection. One in the middle of it ends the connection, as does a
malformed request; the ERROR then has call id 0, where it can be sent at all.
"""

from kvservice.transports.tcp.client import TcpTransport
from kvservice.transports.tcp.server import TcpServer

__all__ = ["TcpServer", "TcpTransport"]
