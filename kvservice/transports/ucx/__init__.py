"""One-sided reads by UCX: RDMA where there is some, CMA on one host, tcp elsewhere."""

from __future__ import annotations

from kvservice.core.errors import NoWayError
from kvservice.ports.one_sided import OneSided
from kvservice.transports.one_sided import EndpointSettings


def why_not(settings: EndpointSettings) -> str:
    """Return why UCX cannot be used here; empty where it can."""
    del settings
    return "the binding is not built"


def UcxEndpoint(settings: EndpointSettings) -> OneSided:  # noqa: N802
    """Return an endpoint."""
    raise NoWayError(why_not(settings))
