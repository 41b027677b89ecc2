"""What the binding raises beside `core.errors.MalformedError`.

None of these is a failure of the service: the transport above knows which peer and which
transfer it was, and says so with one of `core.errors`.
"""

from __future__ import annotations


class UcxError(Exception):
    """UCX refused or failed; `status` is its number, `kvservice.native.ucx.status_text` its words."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class UcxUnavailableError(UcxError):
    """UCX cannot be used in this process; the message says what to do about it."""


class UnsettledError(UcxError):
    """Operations that cannot be ended may touch local memory until the worker is closed."""
