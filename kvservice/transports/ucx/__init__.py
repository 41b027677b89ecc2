"""One-sided reads by UCX: RDMA where there is some, CMA on one host, tcp elsewhere."""

from __future__ import annotations

from kvservice.native import ucx
from kvservice.transports.one_sided import EndpointSettings
from kvservice.transports.ucx.endpoint import UcxEndpoint

__all__ = ["UcxEndpoint", "why_not"]


def why_not(settings: EndpointSettings) -> str:
    """Return why UCX cannot be used in this process; empty where it can, as far as can be told unloaded."""
    return ucx.why_not(settings.library)
