"""Which transports there are, by the scheme of an address.

    shm:               the segments that this process has mapped
    tcp://host:port    the tcp data plane of another daemon
    inproc:            an authority in this process

A scheme that is not built in is looked for among the entry points of the group
`kvservice.transports`; each names a TransportFactory. General code makes what an
address offers and asks for capabilities, never for a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from kvservice.core.errors import InvalidFieldError
from kvservice.ports.transport import TransferAuthority, Transport
from kvservice.transports.inproc import InprocTransport
from kvservice.transports.shm import SegmentMap, ShmTransport
from kvservice.transports.tcp import TcpTransport

ENTRY_POINT_GROUP = "kvservice.transports"


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What this process can give a transport.

    session_token: asked for each transfer.
    mapping: the mapped segments; None where nothing can be mapped.
    authority: the owner of the bytes, if it lives in this process.
    """

    session_token: Callable[[], bytes]
    mapping: SegmentMap | None = None
    authority: TransferAuthority | None = None


class TransportFactory(Protocol):
    """Makes a transport."""

    def __call__(self, address: str, context: TransportContext) -> Transport:
        """Return a transport to `address`, which comes without its scheme.

        Raises:
            InvalidFieldError: the address is malformed, or the context lacks what
                this transport needs.
        """


class TransportRegistry:
    """Schemes and their factories."""

    def __init__(self) -> None:
        self._factories: dict[str, TransportFactory] = {}

    def register(self, scheme: str, factory: TransportFactory) -> None:
        """Let `factory` serve `scheme`, in place of any other."""
        self._factories[scheme] = factory

    def make(self, address: str, context: TransportContext) -> Transport:
        """Return a new transport for "scheme:rest" or "scheme://rest".

        Raises:
            InvalidFieldError: no transport has this scheme, or the address or the
                context does not suit it.
        """
        scheme, colon, rest = address.partition(":")
        if not colon:
            raise InvalidFieldError(f"transport address {address!r} has no scheme")
        return self._factory(scheme)(rest.removeprefix("//"), context)

    def _factory(self, scheme: str) -> TransportFactory:
        known = self._factories.get(scheme)
        if known is not None:
            return known
        found = entry_points(group=ENTRY_POINT_GROUP, name=scheme)
        for entry_point in found:
            factory: TransportFactory = entry_point.load()
            self._factories[scheme] = factory
            return factory
        raise InvalidFieldError(
            f"no transport {scheme!r}: built in are {sorted(self._factories)}, and no installed "
            f"package offers it in the entry points {ENTRY_POINT_GROUP!r}"
        )


def builtin_registry() -> TransportRegistry:
    """Return a registry of the transports of this package."""
    registry = TransportRegistry()
    registry.register("shm", _make_shm)
    registry.register("tcp", _make_tcp)
    registry.register("inproc", _make_inproc)
    return registry


def _make_shm(address: str, context: TransportContext) -> Transport:
    if address:
        raise InvalidFieldError(f"the shm transport has no address; {address!r} was given")
    if context.mapping is None:
        raise InvalidFieldError("the shm transport needs the map of segments of this process")
    return ShmTransport(context.mapping)


def _make_tcp(address: str, context: TransportContext) -> Transport:
    try:
        return TcpTransport(address, context.session_token)
    except ValueError as error:
        raise InvalidFieldError(f"tcp transport: {error}") from error


def _make_inproc(address: str, context: TransportContext) -> Transport:
    if address:
        raise InvalidFieldError(f"the in-process transport has no address; {address!r} was given")
    if context.authority is None:
        raise InvalidFieldError("the in-process transport needs an authority in this process")
    return InprocTransport(context.authority, context.session_token)
