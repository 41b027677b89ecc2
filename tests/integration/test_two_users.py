"""Several users on one lane: each is its tenant and sees that alone; strangers are told why they may not."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import pytest

from tests.integration.daemon_process import keys, opened, tier, until
from tests.integration.scripted_child import scripted_child
from tests.integration.user_child import SHARED

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

ALICE, BOB, CAROL = 61_001, 61_002, 61_003
FRIENDS, NOBODYS = 62_001, 62_002
AT_ONCE_S = 2.0


def digest(word: str) -> str:
    """Return what the settings say of a bearer token."""
    return hashlib.sha256(word.encode()).hexdigest()


CLOSED = f"""
[tenants.default]
token_sha256 = "{digest("default")}"
[tenants.operators]
token_sha256 = "{digest("operators")}"
uids = [0]
[tenants.alpha]
token_sha256 = "{digest("alpha")}"
uids = [{ALICE}]
[tenants.beta]
token_sha256 = "{digest("beta")}"
uids = [{BOB}]
"""
"""Every user is named, and whoever is not is nobody."""


@pytest.fixture
def folder():
    """A folder that every user can look into, whose files are of the group FRIENDS."""
    with tempfile.TemporaryDirectory() as path:
        os.chown(path, 0, FRIENDS)
        Path(path).chmod(0o2755)
        yield Path(path)


def user(uid: int, endpoint: str, *groups: int):
    """Start a client of a user in some groups."""
    return scripted_child("user_child.py", uid, ",".join(map(str, groups)), endpoint)


def ask(child, line: str) -> str:
    """Give an order and return the answer."""
    child.tell(line)
    return child.hear()


def test_each_user_is_its_tenant_and_sees_that_alone(start_daemon, folder):
    """Same model, salt and keys: two users store two sets of blocks; neither memory nor session crosses.

    One who is of no tenant is told who she is and what is missing.
    """
    daemon = start_daemon(folder=folder, config=CLOSED)
    with (
        opened(daemon.lane) as (client, namespace),
        user(ALICE, daemon.lane, FRIENDS) as alice,
        user(BOB, daemon.lane, FRIENDS) as bob,
        user(CAROL, daemon.lane, FRIENDS) as carol,
    ):
        assert client.attachment.tenant == "operators"
        assert carol.hear() == (
            f"TenantUnknownError: user {CAROL} is of no tenant, and the tenant 'default' asks for a token"
        )
        assert {owner.tenant for owner in client.list_tiers().owners} <= {"operators", "alpha", "beta"}
        assert (alice.hear(), bob.hear()) == ("tenant alpha", "tenant beta")
        stored = ask(alice, "store").split()
        assert stored[:5] == ["there", "0", "stored", "8", "in"]
        assert ask(bob, "store").startswith("there 0 stored 8 in ")
        assert (ask(alice, "check"), ask(bob, "check")) == ("found 8 ours", "found 8 ours")
        assert namespace.lookup(keys(SHARED)).prefix_count == 0
        assert client.purge(namespace) == 0
        stolen = ask(bob, f"steal {stored[5]} {stored[7]}")
        assert stolen.startswith("resumed False as beta segments [")
        assert "not lent to tenant 'beta'" in stolen
        assert ask(bob, "purge") == "purged 8"
        assert (ask(alice, "check"), ask(bob, "check")) == ("found 8 ours", "found 0 ours")
        assert ask(alice, "hold") == "holds 8"
        assert tier(client).slots_reserved_count == 8
        alice.kill()
        until(lambda: not tier(client).slots_reserved_count, "the death of another user is seen", AT_ONCE_S)
        assert tier(client).slots_committed_count == 8
    assert "Traceback" not in daemon.said()


def test_the_group_of_the_socket_decides_who_may_connect(start_daemon, folder):
    """Its folder gives the group, the mode lets owner and group in; a user of no tenant is `default`."""
    daemon = start_daemon(folder=folder)
    status = Path(daemon.socket_path).stat()
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert (status.st_uid, status.st_gid) == (0, FRIENDS)
    with (
        user(ALICE, daemon.lane, NOBODYS, FRIENDS) as alice,
        user(BOB, daemon.lane, NOBODYS) as bob,
    ):
        assert alice.hear() == "tenant default"
        refused = bob.hear()
        assert refused.startswith(f"PeerUnavailableError: this user may not connect to {daemon.socket_path}")
        assert "Permission denied" in refused
        assert ask(alice, "store").startswith("there 0 stored 8 in ")
        assert ask(alice, "check") == "found 8 ours"
