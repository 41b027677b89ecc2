"""What a request may bring in its kv_transfer_params, from anybody."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvplugins.vllm.ticket import Ticket, asks_for_handoff
from tests.plugins.fakes import ticket

NUMBER = 0xFFFFFF0000000001  # more than a double can hold
PARAMS = ticket(9, NUMBER, 5).params()


def changed(**fields: Any) -> dict[str, Any]:
    """Return the parameters of a good ticket with other fields; ... leaves one out."""
    return {name: value for name, value in (PARAMS | fields).items() if value is not ...}


def test_a_ticket_survives_a_proxy() -> None:
    """It goes through JSON as often as it likes, with other things beside it."""
    travelled = json.loads(json.dumps(PARAMS)) | {"remote_host": "somewhere"}
    assert Ticket.of(travelled) == ticket(9, NUMBER, 5)
    assert Ticket.of(travelled).params() == PARAMS


@pytest.mark.parametrize(
    "params", [None, "text", [], {}, {"do_remote_prefill": True}, changed(do_remote_prefill=False)]
)
def test_a_request_without_a_ticket_brings_none(params: Any) -> None:
    """Other connectors have parameters of their own; they are none of our business."""
    assert Ticket.of(params) is None


@pytest.mark.parametrize(
    "params",
    [
        changed(kvservice_handoff_ids=[]),
        changed(kvservice_handoff_ids="17"),
        changed(kvservice_handoff_ids=[17]),
        changed(kvservice_handoff_ids=["-1"]),
        changed(kvservice_handoff_ids=["²"]),
        changed(kvservice_handoff_ids=[str(1 << 64)]),
        changed(kvservice_handoff_ids=["1" * 5000]),
        changed(kvservice_handoff_ids=["1"] * 5000),
        changed(kvservice_blocks_count=0),
        changed(kvservice_blocks_count=True),
        changed(kvservice_blocks_count=1 << 40),
        changed(kvservice_blocks_count=...),
        changed(kvservice_daemon=...),
        changed(kvservice_daemon="xyz"),
        changed(kvservice_namespace=7),
        changed(kvservice_namespace="00" * 1000),
    ],
)
def test_what_no_engine_has_made_is_refused(params: dict[str, Any]) -> None:
    """A client may send anything; it is told apart before anything is asked for."""
    with pytest.raises(ValueError, match=r"kvservice_|hexadecimal"):
        Ticket.of(params)


def test_whatever_is_sent_is_a_ticket_or_none_or_refused(rng: random.Random) -> None:
    """Nothing else than ValueError, whatever stands in the fields."""
    oddities = [None, True, -1, 1 << 70, 1.5, "", "7", "ff", "\x00", [], ["7"], [None], {}, {"a": 1}]
    read = 0
    for _ in range(5000):
        params = {name: rng.choice([value, rng.choice(oddities)]) for name, value in PARAMS.items()}
        try:
            read += Ticket.of(params) is not None
        except ValueError:
            continue
    assert read > 0


@pytest.mark.parametrize(
    ("params", "asks"),
    [
        (None, False),
        ("do_remote_decode", False),
        ({"do_remote_decode": 1}, False),
        ({"do_remote_decode": True}, True),
    ],
)
def test_only_a_plain_yes_asks_for_a_handoff(params: Any, asks: bool) -> None:
    """Blocks that are kept for nobody are memory lost for half a minute."""
    assert asks_for_handoff(params) is asks
