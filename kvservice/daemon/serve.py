"""Runs a daemon until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import json
import logging
import signal
import sys
from collections.abc import Callable
from enum import IntEnum

from kvservice.daemon.config import ConfigError, Settings
from kvservice.daemon.wiring import Daemon, Endpoints, NotEnoughMemoryError


class ExitCode(IntEnum):
    """How the daemon ends; documented in the README."""

    OK = 0
    BAD_CONFIGURATION = 2
    ADDRESS_IN_USE = 3
    NOT_ENOUGH_MEMORY = 4
    INTERNAL = 70


def serve(settings: Settings) -> ExitCode:
    """Serve until SIGTERM or SIGINT; say on stderr where, and why it ended."""
    configure_logging(settings)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(settings))
    except ConfigError as error:
        _say(f"kvservice: {error}")
        return ExitCode.BAD_CONFIGURATION
    except NotEnoughMemoryError as error:
        _say(f"kvservice: {error}")
        return ExitCode.NOT_ENOUGH_MEMORY
    except OSError as error:
        _say(f"kvservice: cannot listen: {error}")
        in_use = error.errno in {errno.EADDRINUSE, None}
        return ExitCode.ADDRESS_IN_USE if in_use else ExitCode.BAD_CONFIGURATION


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Prefer uvloop; the loop of the standard library does the same at twice the cost."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def configure_logging(settings: Settings) -> None:
    """Send the daemon's log to stderr, as lines of text or of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.server.log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("kvservice")
    root.handlers[:] = [handler]
    root.setLevel(settings.server.log_level.upper())


async def _serve(settings: Settings) -> ExitCode:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    daemon = Daemon(settings)
    try:
        endpoints = await daemon.start()
    except BaseException:
        await daemon.stop()
        raise
    # What is there now stays; the collector need not look at it again in the middle of a call.
    gc.collect()
    gc.freeze()
    _announce(settings, endpoints)
    waits = [asyncio.create_task(event.wait()) for event in (stopping, daemon.broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await daemon.stop()
    return ExitCode.INTERNAL if daemon.broken.is_set() else ExitCode.OK


def _announce(settings: Settings, endpoints: Endpoints) -> None:
    """Say on one line where to connect; scripts wait for it."""
    places = [f"unix:{endpoints.socket_path}"]
    if endpoints.grpc_address:
        places.append(f"grpc://{endpoints.grpc_address}")
    if endpoints.tcp_address:
        places.append(f"tcp://{endpoints.tcp_address}")
    arena = f"{settings.arena.capacity_bytes} bytes in segments of {settings.arena.segment_bytes}"
    _say(f"kvservice: serving at {' '.join(places)}, arena {arena}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, with the fields of the event."""

    _STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        fields = {k: v for k, v in record.__dict__.items() if k not in self._STANDARD}
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
