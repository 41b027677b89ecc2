"""What a plugin has of the service once it is connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvclient import ClientSettings, Identity, Part
from kvclient.sync import KvClient, Namespace


@dataclass(frozen=True, slots=True)
class Service:
    """A session, and the namespace that this engine works in."""

    client: KvClient
    namespace: Namespace

    def close(self) -> None:
        """End the session, and with it all its leases and reservations."""
        self.client.close()


def opener(settings: ClientSettings, identity: Identity, parts: Sequence[Part]) -> Callable[[], Service]:
    """Return what opens a session and the namespace, for a `ServiceLink`."""

    def open_service() -> Service:
        client = KvClient.connect(settings)
        try:
            return Service(client, client.open_namespace(identity, list(parts)))
        except BaseException:
            client.close()
            raise

    return open_service
