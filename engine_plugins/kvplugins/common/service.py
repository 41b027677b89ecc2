"""What a plugin has of the service once it is connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvclient import ClientSettings, Identity, Part
from kvclient.sync import KvClient, Namespace


@dataclass(frozen=True, slots=True)
class Service:
    """A session, and the namespace that this engine works in.

    by_part: the same namespace, opened for one part at a time; in the order of the parts.
    """

    client: KvClient
    namespace: Namespace
    by_part: tuple[Namespace, ...] = ()

    def is_with(self, daemon_incarnation: bytes) -> bool:
        """Whether this session is one with that life of the daemon.

        What is on this host is read without a call, so a session that has asked for nothing for a while
        would go on with the memory, and by the name, of a daemon that has ended. A call makes it find the
        successor.
        """
        if self.client.attachment.daemon_incarnation != daemon_incarnation:
            self.client.list_tiers()
        return self.client.attachment.daemon_incarnation == daemon_incarnation

    def close(self) -> None:
        """End the session, and with it all its leases and reservations."""
        self.client.close()


def opener(settings: ClientSettings, identity: Identity, parts: Sequence[Part]) -> Callable[[], Service]:
    """Return what opens a session and the namespace, for a `ServiceLink`."""

    def open_service() -> Service:
        client = KvClient.connect(settings)
        try:
            namespace = client.open_namespace(identity, list(parts))
            if len(parts) == 1:
                return Service(client, namespace, (namespace,))
            return Service(
                client, namespace, tuple(client.open_namespace(identity, [part]) for part in parts)
            )
        except BaseException:
            client.close()
            raise

    return open_service
