"""The connector's settings."""

from __future__ import annotations

import pytest

from kvplugins.vllm.settings import PluginSettings

ENDPOINT = {"endpoint": "unix:/run/kv.sock"}


def test_defaults_need_nothing_but_an_endpoint() -> None:
    """The shortest configuration works."""
    settings = PluginSettings.from_extra_config(ENDPOINT)
    assert settings.endpoint == "unix:/run/kv.sock"
    assert not settings.save_decode
    assert settings.handoff == "auto"
    assert settings.save_handed_off


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, '"endpoint" is missing'),
        ({"endpoint": "/run/kv.sock"}, "must be unix:/path or grpc://host:port"),
        (ENDPOINT | {"save_decod": True}, "did you mean save_decode?"),
        (ENDPOINT | {"zzz": 1}, "known keys: "),
        (ENDPOINT | {"save_decode": 1}, "save_decode is a int and must be of type bool"),
        (ENDPOINT | {"lookup_timeout_ms": True}, "lookup_timeout_ms is a bool and must be of type int"),
        (ENDPOINT | {"handoff": "on"}, "handoff = 'on' must be one of auto, direct, off"),
        (ENDPOINT | {"handoff_wait_ms": 90_000}, "handoff_wait_ms = 90000 must be from 100 to 60000"),
        (ENDPOINT | {"lookup_timeout_ms": 0}, "lookup_timeout_ms = 0 must be from 1 to 10000"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_way_out(extra: dict[str, object], said: str) -> None:
    """A misspelt key that is ignored is found weeks later, by its cost."""
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refused:
        PluginSettings.from_extra_config(extra)
    assert said in str(refused.value)


def test_a_token_is_not_printed() -> None:
    """Settings end up in logs and tracebacks."""
    assert "secret" not in repr(PluginSettings.from_extra_config(ENDPOINT | {"token": "secret"}))
