"""How the processes of this engine open their sessions with the service."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TypeVar

from kvclient import ClientSettings
from kvplugins.common.link import ServiceLink
from kvplugins.common.service import Service
from kvplugins.vllm.settings import PluginSettings

Connected = TypeVar("Connected", bound=Service)


def client_settings(
    settings: PluginSettings, *, engine_incarnation: bytes, name: str, timeout_s: float
) -> ClientSettings:
    """Return what a session is opened with.

    name: what operators see of it.
    timeout_s: of one call, and of one batch of blocks.
    """
    made = ClientSettings(
        endpoint=settings.endpoint,
        call_timeout_s=timeout_s,
        transfer_timeout_s=timeout_s,
        connect_timeout_s=settings.connect_timeout_ms / 1e3,
        client_name=name,
        engine_incarnation=engine_incarnation,
        token=settings.token,
        verify=settings.verify,
    )
    one_sided = dataclasses.replace(
        made.one_sided,
        library=settings.ucx_library,
        transports=settings.ucx_transports,
        devices=settings.ucx_devices,
    )
    return dataclasses.replace(made, one_sided=one_sided)


def start_link(
    settings: PluginSettings, connect: Callable[[], Connected], logger: logging.Logger
) -> ServiceLink[Connected]:
    """Return a link that has tried once; what failed is tried again in the background."""
    link = ServiceLink(
        name=f"kvservice at {settings.endpoint}",
        connect=connect,
        close=Service.close,
        retry_after_s=settings.retry_after_ms / 1e3,
        logger=logger,
    )
    link.start()
    return link
