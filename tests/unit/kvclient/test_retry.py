"""What may be sent twice, and how long to wait before."""

from kvclient.retry import BACKOFF_FIRST_S, BACKOFF_LIMIT_S, SAFE_TO_RETRY, Backoff
from kvservice.ports.methods import Method

NEVER_RETRIED = {
    Method.ACQUIRE,
    Method.BEGIN_TRANSFER,
    Method.DETACH,
    Method.REGISTER_SEGMENTS,
    Method.STREAM,
    Method.WATCH_EVENTS,
    Method.READ_SLOTS,
    Method.WRITE_SLOTS,
}


def test_every_method_is_classified():
    """A new method is a decision: either its second execution changes nothing, or it is not retried."""
    assert set(Method) == SAFE_TO_RETRY | NEVER_RETRIED
    assert not SAFE_TO_RETRY & NEVER_RETRIED


def test_pauses_grow_to_a_limit_and_start_over(seed):
    """Pauses double with jitter in the upper half of their span, up to a second."""
    backoff = Backoff(seed)
    pauses = [backoff.next_s() for _ in range(12)]
    spans = [min(BACKOFF_FIRST_S * 2**number, BACKOFF_LIMIT_S) for number in range(12)]
    assert all(span / 2 <= pause <= span for pause, span in zip(pauses, spans, strict=True))
    backoff.reset()
    assert backoff.next_s() <= BACKOFF_FIRST_S
