"""Whom a caller stands for: tenants by bearer token, or by user on this host."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvservice.core.errors import TenantUnknownError

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The table of tenants.

    by_token: SHA-256 of a bearer token to tenant. by_uid: local user to tenant.
    default_is_open: whoever shows nothing is the tenant `default`.
    """

    by_token: dict[bytes, str]
    by_uid: dict[int, str]
    default_is_open: bool = True

    def tenant_of_token(self, token: str | None) -> str:
        """Return the tenant of a bearer token, or of none.

        Raises:
            TenantUnknownError: the token names nobody.
        """
        if token is None:
            return self._default("no bearer token was given")
        # The digest is looked up, not the token compared, so that the time taken
        # says nothing about how much of a guess was right.
        tenant = self.by_token.get(hashlib.sha256(token.encode()).digest())
        if tenant is None:
            raise TenantUnknownError("the bearer token names no tenant of this daemon")
        return tenant

    def tenant_of_uid(self, uid: int) -> str:
        """Return the tenant of a local user.

        Raises:
            TenantUnknownError: the user is nobody's.
        """
        tenant = self.by_uid.get(uid)
        return tenant if tenant is not None else self._default(f"user {uid} is of no tenant")

    def _default(self, why: str) -> str:
        if not self.default_is_open:
            raise TenantUnknownError(f"{why}, and the tenant 'default' asks for a token")
        return DEFAULT_TENANT
