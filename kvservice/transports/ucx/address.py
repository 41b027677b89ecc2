"""What a lender says of itself beside UCX's own address: where it runs, and as which process.

    magic "KVU1" | flags, u8 | host, 16 bytes | pid, u32 | start of the process in clock ticks, u64 |
    UCX's address

Flag 1: the process lets itself be read by messages, where the wire has no one-sided operations.

`host` is equal for processes that CMA can connect: one boot of one kernel, one namespace of
process numbers. CMA names a process by its number alone, so a reader holds the number to the
time at which that process began.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from kvservice.core.errors import MalformedError

_HEAD = struct.Struct("<4sB16sIQ")
_BY_MESSAGES = 1
_MAGIC = b"KVU1"
_START_FIELD = 19
"""Of /proc/PID/stat, counted behind the name of the command."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """An address, taken apart."""

    host: bytes
    pid: int
    started_ticks: int
    packed: bytes
    by_messages: bool = False

    @classmethod
    def of_this_process(cls, packed: bytes, *, by_messages: bool = False) -> PeerAddress:
        """Return the address of a worker of this process. packed: as UCX gives it."""
        pid = os.getpid()
        return cls(this_host(), pid, started_ticks(pid), packed, by_messages)

    @classmethod
    def parse(cls, address: bytes) -> PeerAddress:
        """Take an address apart. Raises MalformedError."""
        if len(address) <= _HEAD.size or not address.startswith(_MAGIC):
            raise MalformedError(f"{len(address)} bytes are no address of a UCX endpoint of kvservice")
        _, flags, host, pid, ticks = _HEAD.unpack_from(address)
        return cls(host, pid, ticks, address[_HEAD.size :], bool(flags & _BY_MESSAGES))

    def encode(self) -> bytes:
        """Return the address as it travels."""
        flags = _BY_MESSAGES if self.by_messages else 0
        return _HEAD.pack(_MAGIC, flags, self.host, self.pid, self.started_ticks) + self.packed

    @property
    def is_here(self) -> bool:
        """Whether the peer runs where CMA could reach it."""
        return self.host == this_host()


def this_host() -> bytes:
    """Return 16 bytes that processes share which see each other's process numbers; never zero."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = str(Path("/proc/self/ns/pid").readlink()).encode()
    return hashlib.sha256(boot + namespace).digest()[:16]


def started_ticks(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(fields.rpartition(")")[2].split()[_START_FIELD])
