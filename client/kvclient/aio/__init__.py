"""The asynchronous client: `async with await KvClient.connect() as client: ...`."""

from __future__ import annotations

from kvclient.aio.client import KvClient
from kvclient.aio.events import EventStream
from kvclient.aio.lease_view import LeaseView
from kvclient.aio.namespace import Namespace

__all__ = ["EventStream", "KvClient", "LeaseView", "Namespace"]
