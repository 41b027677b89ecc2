"""`kvservice status`: what a daemon does and who holds what."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from google.protobuf.json_format import MessageToDict

from kvclient import ClientSettings, KvError
from kvclient.sync import KvClient

EXIT_NO_DAEMON = 1


def add_command(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("status", help="show a daemon's tiers, and who holds what")
    parser.add_argument("--endpoint", help="unix:PATH or grpc://HOST:PORT (default: this user's daemon)")
    parser.add_argument("--owners", action="store_true", help="also list every session and what it holds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        settings = ClientSettings(client_name="kvservice status")
        if options.endpoint:
            settings = dataclasses.replace(settings, endpoint=options.endpoint)
        with KvClient.connect(settings) as client:
            capabilities, tiers = client.capabilities(), client.list_tiers()
    except KvError as error:
        sys.stderr.write(f"kvservice: {error}\n")
        return EXIT_NO_DAEMON
    if options.json:
        report = {"capabilities": _plain(capabilities), **_plain(tiers)}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return 0
    _print_text(capabilities, tiers, with_owners=options.owners)
    return 0


def _plain(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _print_text(capabilities: Any, tiers: Any, *, with_owners: bool) -> None:
    write = sys.stdout.write
    native = "C extension" if capabilities.has_native else "NumPy fallback"
    write(f"kvservice {capabilities.version}, life {capabilities.daemon_incarnation.hex()}, {native}\n")
    for transport in capabilities.transports:
        write(f"  {transport.name:5} {transport.address}\n")
    for tier in tiers.tiers:
        share = tier.used_bytes / max(tier.capacity_bytes, 1)
        write(
            f"tier {tier.name}: {tier.used_bytes} of {tier.capacity_bytes} bytes ({share:.0%}), "
            f"{tier.segments_lent_count} of {tier.segments_total_count} segments lent\n"
            f"  slots: {tier.slots_total_count} = {tier.slots_free_count} free "
            f"+ {tier.slots_reserved_count} reserved + {tier.slots_committed_count} committed "
            f"+ {tier.slots_evicting_count} evicting + {tier.slots_quarantined_count} quarantined; "
            f"{tier.evicted_count} blocks evicted so far\n"
        )
    write(f"sessions: {len(tiers.owners)}\n")
    if with_owners:
        for owner in tiers.owners:
            kind = "local" if owner.is_local else "remote"
            write(
                f"  {owner.session_id:#x} {owner.client_name or '(no name)'} tenant={owner.tenant} {kind} "
                f"age={owner.age_ms / 1000:.1f}s reservations={owner.reservations_count} "
                f"({owner.slots_reserved_count} slots) leases={owner.leases_count}\n"
            )
