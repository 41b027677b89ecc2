"""The scheduler's leases, over a link that may be down."""

from __future__ import annotations

from collections.abc import Sequence

from kvclient import Lease
from kvplugins.common.link import ServiceLink
from kvplugins.common.service import Service
from kvplugins.vllm.scheduler_side import HeldLease


class LinkedLeases:
    """Acquires and releases through a link: without a service nothing is a hit.

    A release that does not reach the service is not repeated: the lease ends with its session, and a session
        that the
    link has lost is closed.
    """

    def __init__(self, link: ServiceLink[Service]) -> None:
        self._link = link

    def acquire(self, keys: Sequence[bytes]) -> HeldLease | None:
        """Lease the longest contiguous stored prefix of the keys."""
        packed = b"".join(keys)
        return self._link.call(lambda service: service.namespace.acquire(packed))

    def release(self, leases: Sequence[HeldLease]) -> None:
        """End leases, by their ids."""
        held = [lease for lease in leases if isinstance(lease, Lease)]
        self._link.call(lambda service: service.client.release(held))
