"""Whom a caller stands for."""

import hashlib

import pytest

from kvservice.core.errors import TenantUnknownError
from kvservice.service.credentials import Credentials


def digest(token):
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode()).digest()


@pytest.fixture
def credentials():
    """Two tenants, and an open default."""
    return Credentials({digest("red-token"): "red", digest("blue-token"): "blue"}, {1001: "red"})


def test_a_token_names_its_tenant(credentials):
    """The digest is what is kept; the token itself is what is shown."""
    assert credentials.tenant_of_token("red-token") == "red"
    assert credentials.tenant_of_token("blue-token") == "blue"


def test_no_token_is_the_default_tenant(credentials):
    """Whoever shows nothing is `default`, while that is open."""
    assert credentials.tenant_of_token(None) == "default"
    assert credentials.tenant_of_uid(4711) == "default"


@pytest.mark.parametrize("token", ["", "wrong", "red-token ", "RED-TOKEN", "é", digest("red-token").hex()])
def test_a_wrong_token_is_nobody(credentials, token):
    """A wrong token never falls back to the default: it would hide a typing error."""
    with pytest.raises(TenantUnknownError) as caught:
        credentials.tenant_of_token(token)
    assert not token.strip() or token not in caught.value.message


def test_a_user_is_its_tenant(credentials):
    """Local users are told by the kernel who they are."""
    assert credentials.tenant_of_uid(1001) == "red"


def test_a_closed_default_asks_for_a_token():
    """Once `default` has a token, nothing shown is nobody, and the message says what to do."""
    closed = Credentials({digest("t"): "default"}, {7: "red"}, default_is_open=False)
    assert closed.tenant_of_token("t") == "default"
    assert closed.tenant_of_uid(7) == "red"
    with pytest.raises(TenantUnknownError, match="token"):
        closed.tenant_of_token(None)
    with pytest.raises(TenantUnknownError, match="user 8"):
        closed.tenant_of_uid(8)
