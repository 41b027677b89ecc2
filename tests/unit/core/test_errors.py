"""Reasons and outcomes are those of the protocol."""

import pytest

from kvproto.kv.v1 import block_pb2, error_reason_pb2
from kvservice.core import errors
from kvservice.core.errors import ERROR_BY_REASON, InvariantError, KvError, Reason, invariant
from kvservice.core.outcomes import ItemOutcome


def of_protocol(enum, prefix):
    """Return the values of a protocol enum by their names without the prefix."""
    return {name.removeprefix(prefix): number for name, number in enum.items()}


def test_reasons_are_those_of_the_protocol():
    """The core cannot import kv.v1, so this is what keeps `Reason` equal to it, by name and number."""
    assert {reason.name: reason.value for reason in Reason} == of_protocol(
        error_reason_pb2.ErrorReason, "ERROR_REASON_"
    )


def test_outcomes_are_those_of_the_protocol():
    """Batches carry the numbers of `ItemOutcome` as bytes, so both ends must mean the same by them."""
    assert {outcome.name: outcome.value for outcome in ItemOutcome} == of_protocol(
        block_pb2.ItemOutcome, "ITEM_OUTCOME_"
    )


def test_every_reason_has_one_error_and_every_error_a_reason():
    """An edge maps errors by their reason: none is missing, and no two share one."""
    assert set(ERROR_BY_REASON) == set(Reason) - {Reason.UNSPECIFIED}
    classes = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KvError)
    }
    assert set(ERROR_BY_REASON.values()) == classes - {KvError}
    assert all(error.reason is reason for reason, error in ERROR_BY_REASON.items())


def test_an_error_carries_its_message_and_hint():
    """The message is what the caller reads, and the hint is None where a retry is useless."""
    error = errors.ArenaFullError("full", retry_after_ms=50)
    assert (str(error), error.message, error.retry_after_ms) == ("full", "full", 50)
    assert errors.NotOwnerError("no").retry_after_ms is None


def test_a_broken_rule_raises_and_a_kept_one_does_not():
    """`invariant` is no assert: it stays under -O."""
    invariant(True, "kept")
    with pytest.raises(InvariantError, match="broken"):
        invariant(False, "broken")
