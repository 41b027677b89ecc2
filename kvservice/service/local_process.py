"""Who is at the other end of a Unix socket, and when that process dies."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_SO_PEERPIDFD = 77
"""Linux 6.5 and later; not yet in the standard library."""

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A process of this host.

    pidfd: becomes readable when the process ends; owned by whoever asked.
    """

    pid: int
    uid: int
    pidfd: int


def peer_process(connection: socket.socket) -> LocalProcess:
    """Return the process that connected.

    Raises:
        OSError: it is gone, or the kernel has no pidfds (before 5.3).
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        # An older kernel: between the connect and this call the number could have
        # been given to another process, in theory.
        pidfd = os.pidfd_open(pid)
    return LocalProcess(pid, uid, pidfd)
