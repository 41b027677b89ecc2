"""What a prefill engine gives to whoever decodes: the number of a handoff, in `kv_transfer_params`.

A ticket travels through proxies and clients, so nothing in it is believed. It can make an engine ask the
daemon for the wrong handoff, or for none; that costs a recomputation. Which blocks came is settled by their
keys, which are the decoding engine's own (`worker_side`).

    {"do_remote_prefill": true, "do_remote_decode": false,
     "kvservice_handoff_ids": ["<decimal>", ...],      for each rank; text: JSON's numbers have 53 bits
     "kvservice_blocks_count": 9,
     "kvservice_daemon": "<hex>",                      life of the daemon that knows the handoffs
     "kvservice_namespace": "<hex>"}                   model, tenant and salt, as one digest
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ASKS_FOR_HANDOFF = "do_remote_decode"
BRINGS_HANDOFF = "do_remote_prefill"
IDS = "kvservice_handoff_ids"
BLOCKS = "kvservice_blocks_count"
DAEMON = "kvservice_daemon"
NAMESPACE = "kvservice_namespace"

# More ranks than any engine has, and longer than any of the texts is.
IDS_MAX = 4096
TEXT_CHARACTERS_MAX = 128
ID_LIMIT = 1 << 64
BLOCKS_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Blocks of a prompt that wait in the engine that computed them.

    handoff_ids: a handoff for each rank, in their order.
    blocks_count: whole blocks, from the prompt's first on.
    """

    handoff_ids: tuple[int, ...]
    blocks_count: int
    daemon_incarnation: bytes
    namespace_id: bytes

    def params(self) -> dict[str, object]:
        """Return it as `kv_transfer_params` of the request that decodes."""
        return {
            BRINGS_HANDOFF: True,
            ASKS_FOR_HANDOFF: False,
            IDS: [str(number) for number in self.handoff_ids],
            BLOCKS: self.blocks_count,
            DAEMON: self.daemon_incarnation.hex(),
            NAMESPACE: self.namespace_id.hex(),
        }

    @classmethod
    def of(cls, params: object) -> Ticket | None:
        """Read the ticket of a request; None if it brings none.

        Raises:
            ValueError: it brings something that no engine of ours has made.
        """
        if not isinstance(params, Mapping) or params.get(BRINGS_HANDOFF) is not True or IDS not in params:
            return None
        numbers, count = params[IDS], params.get(BLOCKS)
        if not isinstance(numbers, list) or not 0 < len(numbers) <= IDS_MAX:
            raise ValueError(f"{IDS} must be a list of 1 to {IDS_MAX} numbers")
        if type(count) is not int or not 0 < count < BLOCKS_LIMIT:
            raise ValueError(f"{BLOCKS} must be a number above 0")
        return cls(
            handoff_ids=tuple(_handoff_id(number) for number in numbers),
            blocks_count=count,
            daemon_incarnation=_digest(params, DAEMON),
            namespace_id=_digest(params, NAMESPACE),
        )


def asks_for_handoff(params: object) -> bool:
    """Whether a request is to be decoded elsewhere."""
    return isinstance(params, Mapping) and params.get(ASKS_FOR_HANDOFF) is True


def _handoff_id(text: object) -> int:
    if (
        not isinstance(text, str)
        or not text.isascii()
        or not text.isdecimal()
        or len(text) > TEXT_CHARACTERS_MAX
    ):
        raise ValueError(f"{IDS} must hold decimal numbers, as text")
    number = int(text)
    if number >= ID_LIMIT:
        raise ValueError(f"{IDS} must hold numbers of 64 bits")
    return number


def _digest(params: Mapping[object, object], key: str) -> bytes:
    text = params.get(key)
    if not isinstance(text, str) or not 0 < len(text) <= TEXT_CHARACTERS_MAX:
        raise ValueError(f"{key} must be a text of hexadecimal digits")
    return bytes.fromhex(text)
