"""Which calls may be sent again after a lost connection, and how soon."""

from __future__ import annotations

import random

from kvservice.ports.methods import Method

SAFE_TO_RETRY = frozenset(
    {
        Method.ATTACH,  # with a resume token
        Method.OPEN_NAMESPACE,
        Method.HEARTBEAT,
        Method.LOOKUP,  # the client never asks for a lease with it
        Method.RESERVE,  # found again by its request id
        Method.COMMIT,
        Method.ABORT,
        Method.RENEW,
        Method.RELEASE,
        Method.VERIFY,
        Method.LIST_TIERS,
        Method.PURGE_NAMESPACE,
        Method.GET_CAPABILITIES,
        Method.MAP_SEGMENTS,
        Method.UNREGISTER_SEGMENTS,
        Method.OFFER_HANDOFF,  # found again by its request id
        Method.CLAIM_HANDOFF,  # the claimer gets the same answer again
        Method.COMPLETE_HANDOFF,
        Method.REJECT_HANDOFF,
        Method.ABORT_HANDOFF,
        Method.GET_HANDOFF,
        Method.END_TRANSFER,  # answered as the first one was
    }
)
"""Methods whose second execution changes nothing more. ACQUIRE, REGISTER_SEGMENTS and BEGIN_TRANSFER are
not among them: each success is another lease, segment or transfer, and the first would be nobody's."""

BACKOFF_FIRST_S = 0.01
"""A daemon that only dropped the connection is back at once."""

BACKOFF_LIMIT_S = 1.0
"""A restarting daemon is found within a second of its return."""

BACKOFF_FACTOR = 2.0


class Backoff:
    """Pauses between attempts to connect. Each is drawn from the upper half of its
    span, so that the processes of an engine do not come back in step.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._span_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        """Return the next pause, in seconds."""
        span_s = self._span_s
        self._span_s = min(span_s * BACKOFF_FACTOR, BACKOFF_LIMIT_S)
        return span_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start over, after a success."""
        self._span_s = BACKOFF_FIRST_S
