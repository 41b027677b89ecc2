"""Which one-sided transports there are, by name, and the settings of an endpoint.

General code asks for an endpoint and for what it can do, never for a transport by name. One
that is not built in is looked for among the entry points of the group `kvservice.one_sided`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from kvservice.core.errors import InvalidFieldError, NoWayError
from kvservice.ports.one_sided import OneSided

ENTRY_POINT_GROUP = "kvservice.one_sided"
BUILT_IN = "ucx"
NONE = ""

DEVICES_CHARACTERS_MAX = 1024
REGISTRATION_BYTES_MIN = 4096


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """How a process lends and reads memory.

    transport: "ucx", the name of an installed one, or "" for none.
    library: which UCX: "auto", "wheel" (the package libucx), "system", or a path of libucp.so.
    transports: what UCX may use, as UCX_TLS takes it; "" leaves it to UCX.
    devices: network devices, as UCX_NET_DEVICES takes them; "" leaves it to UCX. A list of such
        lists, separated by ";", makes a lane of each.
    by_messages: let others read what this process lends also over wires that have no one-sided
        operations (tcp). UCX makes them out of messages then, which this process has to answer, and
        UCX 1.22 ends it where a reader goes away in the middle: not for a process that is worth more.
    registration_bytes: most bytes of one registration, where a wire limits it; 0 for no limit.

    Raises:
        InvalidFieldError: a value is out of its range.
    """

    transport: str = BUILT_IN
    library: str = "auto"
    transports: str = ""
    devices: str = ""
    by_messages: bool = False
    registration_bytes: int = 0

    def __post_init__(self) -> None:
        """Hold the fields to their limits."""
        if self.registration_bytes and self.registration_bytes < REGISTRATION_BYTES_MIN:
            raise InvalidFieldError(
                f"registration_bytes is {self.registration_bytes}; give 0 for no limit, or "
                f"{REGISTRATION_BYTES_MIN} at least"
            )
        for name in ("transport", "library", "transports", "devices"):
            value = getattr(self, name)
            if len(value) > DEVICES_CHARACTERS_MAX or not value.isprintable():
                raise InvalidFieldError(
                    f"{name} is {value[:40]!r}...; give printable text of at most {DEVICES_CHARACTERS_MAX} "
                    "characters"
                )


def usable_transports(settings: EndpointSettings) -> list[str]:
    """Return the names of what an endpoint with these settings could read by; loads nothing heavy."""
    if settings.transport == NONE:
        return []
    if settings.transport == BUILT_IN:
        from kvservice.transports.ucx import why_not  # noqa: PLC0415 - loaded by those who use it

        return [] if why_not(settings) else [BUILT_IN]
    return [settings.transport] if entry_points(group=ENTRY_POINT_GROUP, name=settings.transport) else []


def make_endpoint(settings: EndpointSettings) -> OneSided | None:
    """Return a new endpoint; None where the settings name none.

    Raises:
        NoWayError: the transport cannot be used here, and why.
    """
    if settings.transport == NONE:
        return None
    if settings.transport == BUILT_IN:
        from kvservice.transports.ucx import UcxEndpoint, why_not  # noqa: PLC0415 - see above

        reason = why_not(settings)
        if reason:
            raise NoWayError(f"ucx cannot be used here: {reason}")
        return UcxEndpoint(settings)
    found = entry_points(group=ENTRY_POINT_GROUP, name=settings.transport)
    for entry_point in found:
        try:
            factory: Callable[[EndpointSettings], OneSided] = entry_point.load()
        except (ImportError, AttributeError) as error:
            raise NoWayError(f"{settings.transport} cannot be used here: {error}") from error
        return factory(settings)
    raise NoWayError(
        f"no one-sided transport {settings.transport!r}: built in is {BUILT_IN!r}, and no installed package "
        f"offers it in the entry points {ENTRY_POINT_GROUP!r}"
    )
