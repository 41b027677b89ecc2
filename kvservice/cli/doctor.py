"""`kvservice doctor`: how bytes can go to a daemon and between engines, how fast, and why not otherwise."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from kvservice.cli.doctor_report import Wire, render

EXIT_NO_DAEMON = 1
EXIT_TOO_SLOW = 6
DEFAULT_FLOOR_GBPS = 0.1
"""Below it something is wrong, whatever the machine: a gigabit network has as much."""

DEFAULT_BYTES = 64 << 20


def add_command(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="measure each way to a daemon and between engines here, and say why others are not used",
        description="Exit codes: 0 all is well, 1 no daemon, 6 the selected way is slower than the floor.",
    )
    parser.add_argument(
        "--endpoint", help="unix:PATH or grpc://HOST:PORT of the daemon (default: this user's)"
    )
    parser.add_argument("--token", default="", help="bearer token, where the daemon asks for one")
    parser.add_argument(
        "--floor-gbps", type=float, default=DEFAULT_FLOOR_GBPS, metavar="X", help="least GB/s that is well"
    )
    parser.add_argument(
        "--bytes", type=int, default=DEFAULT_BYTES, metavar="N", help="bytes to move for each measurement"
    )
    parser.add_argument("--library", default="auto", help="which UCX: auto, wheel, system, or a path")
    parser.add_argument("--devices", default="", help="network devices, as UCX_NET_DEVICES takes them")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvclient import KvError
    from kvservice.cli.doctor_engines import engine_wires
    from kvservice.cli.doctor_peer import peer_wires
    from kvservice.transports.one_sided import EndpointSettings

    if options.bytes < 1 << 20:
        sys.stderr.write(f"kvservice: --bytes is {options.bytes}; a mebibyte at least tells anything\n")
        return 2
    settings = EndpointSettings(library=options.library, devices=options.devices)
    try:
        wires = peer_wires(options.endpoint, options.token, settings, size_bytes=options.bytes)
    except KvError as error:
        sys.stderr.write(f"kvservice: {error}\n")
        return EXIT_NO_DAEMON
    wires += engine_wires(settings, size_bytes=options.bytes)
    slow = [wire for wire in wires if wire.is_selected and wire.slowest_gbps < options.floor_gbps]
    if options.json:
        report = {
            "wires": [dataclasses.asdict(wire) for wire in wires],
            "floor_gbps": options.floor_gbps,
            "is_well": not slow,
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(render(wires))
        sys.stdout.write(_verdict(slow, options.floor_gbps))
    return EXIT_TOO_SLOW if slow else 0


def _verdict(slow: list[Wire], floor_gbps: float) -> str:
    if not slow:
        return f"every selected way is at {floor_gbps:g} GB/s or more\n"
    return "".join(
        f"{wire.to} by {wire.transport}: {wire.slowest_gbps:.3g} GB/s, less than the floor of "
        f"{floor_gbps:g}\n"
        for wire in slow
    )
