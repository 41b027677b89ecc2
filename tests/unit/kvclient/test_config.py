"""Settings check themselves, and the environment is read only for the default endpoint."""

import pytest

from kvclient import ClientSettings, InvalidFieldError
from kvclient.config import default_endpoint


def test_the_default_endpoint_comes_from_the_environment(monkeypatch):
    """KVSERVICE_ENDPOINT wins, then the runtime directory, then a folder of this user's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("KVSERVICE_ENDPOINT", "grpc://host:1")
    assert default_endpoint() == "grpc://host:1"
    monkeypatch.delenv("KVSERVICE_ENDPOINT")
    assert ClientSettings().endpoint == "unix:/run/user/7/kvservice.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_endpoint().startswith("unix:/tmp/kvservice-")


def test_an_endpoint_is_one_of_two_kinds():
    """The scheme says whether bytes go over shared memory or over tcp."""
    lane, grpc = ClientSettings(endpoint="unix:/a/b.sock"), ClientSettings(endpoint="grpc://[::1]:50051")
    assert (lane.lane_path, lane.grpc_target) == ("/a/b.sock", "")
    assert (grpc.lane_path, grpc.grpc_target) == ("", "[::1]:50051")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "http://host:1"}, "endpoint is 'http://host:1'"),
        ({"endpoint": "unix:"}, "endpoint"),
        ({"endpoint": "grpc://host"}, "endpoint"),
        ({"endpoint": "grpc://:80"}, "endpoint"),
        ({"endpoint": "grpc://host:99999"}, "endpoint"),
        ({"call_timeout_s": 0}, "call_timeout_s is 0"),
        ({"transfer_timeout_s": -1.0}, "transfer_timeout_s is -1"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s is nan"),
        ({"engine_incarnation": b"short"}, "engine_incarnation has 5 bytes"),
        ({"client_name": "x" * 129}, "client_name has 129"),
    ],
)
def test_a_bad_setting_fails_when_it_is_made(changes, words):
    """The error names the setting, its value and what is allowed."""
    with pytest.raises(InvalidFieldError, match=words):
        ClientSettings(**{"endpoint": "unix:/a", **changes})


def test_the_token_is_not_printed():
    """A secret does not reach a log by way of a repr."""
    assert "secret" not in repr(ClientSettings(endpoint="unix:/a", token="secret"))
