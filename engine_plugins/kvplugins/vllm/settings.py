"""The connector's settings: what vLLM passes on as `kv_connector_extra_config`, checked and typed."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass

# Key -> (least, most). A value outside is a typing mistake, or would hold the engine for minutes.
RANGES = {
    "connect_timeout_ms": (10, 60_000),
    "lookup_timeout_ms": (1, 10_000),
    "queued_load_timeout_ms": (10, 600_000),
    "transfer_timeout_ms": (10, 60_000),
    "handoff_timeout_ms": (10, 60_000),
    "handoff_wait_ms": (100, 60_000),
    "retry_after_ms": (10, 600_000),
    "queued_loads_max": (1, 100_000),
    "blocks_per_call_max": (1, 4096),
}

# Whether blocks go from engine to engine where a request says so, and which way.
HANDOFF_CHOICES = ("auto", "direct", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What the operator sets; field names are the keys.

    endpoint: where the daemon listens: "unix:/path" or "grpc://host:port".
    token: bearer token that names the tenant; empty where the daemon asks for none.
    model_id: name of the model; empty takes vLLM's. Instances that know the model by different names share
        blocks only if they agree here.
    weights_revision: digest or revision of the weights; empty derives it (see `identity`).
    verify: check the checksum of what is loaded. Without it, bytes that changed in the service's memory
        become wrong tokens.
    save_decode: store the blocks of generated tokens too, not only those of prompts.
    handoff: what to do where a request is prefilled here and decoded elsewhere, or the other way round.
        "auto": hand its blocks over, by the way that the service finds the cheapest; "direct": out of the
        memory of the engine that computed them, always; "off": through the store alone.
    save_handed_off: store the blocks of a prompt that is handed over too, so that others find its prefix.
    ucx_library, ucx_transports, ucx_devices: which UCX reads other engines' memory and lends this one's, and
        what it may use, as UCX_TLS and UCX_NET_DEVICES take it; empty leaves it to UCX.
    allow_fail_policy: run although vLLM's `kv_load_failure_policy` is "fail", which fails a request whenever
        one of its blocks is lost between lookup and load.
    connect_timeout_ms: one attempt to connect.
    lookup_timeout_ms: how long vLLM's scheduler, and with it every request, may wait for one lookup.
    queued_load_timeout_ms: a load that has not begun by then is given up.
    transfer_timeout_ms: one call that moves blocks; also how long one step of the engine may wait for its
        blocks to be stored.
    handoff_timeout_ms: one passage of a request's blocks from engine to engine.
    handoff_wait_ms: how long a prefill engine keeps blocks that nobody comes for.
    retry_after_ms: how long the engine goes without the service after it was lost, before it tries again.
    queued_loads_max: loads that wait; more are recomputed at once.
    blocks_per_call_max: blocks moved by one call to the service.
    """

    endpoint: str
    token: str = dataclasses.field(default="", repr=False)
    model_id: str = ""
    weights_revision: str = ""
    verify: bool = True
    save_decode: bool = False
    handoff: str = "auto"
    save_handed_off: bool = True
    ucx_library: str = "auto"
    ucx_transports: str = ""
    ucx_devices: str = ""
    allow_fail_policy: bool = False
    connect_timeout_ms: int = 2_000
    lookup_timeout_ms: int = 250
    queued_load_timeout_ms: int = 10_000
    transfer_timeout_ms: int = 1_000
    handoff_timeout_ms: int = 10_000
    handoff_wait_ms: int = 30_000
    retry_after_ms: int = 2_000
    queued_loads_max: int = 256
    blocks_per_call_max: int = 256

    def __post_init__(self) -> None:
        """Refuse wrong values with the key and what it takes."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # bool is an int in Python, and true is no number of milliseconds.
            if type(value).__name__ != str(field.type):
                raise ValueError(
                    f"kv_connector_extra_config: {field.name} is a {type(value).__name__} and must be of "
                    f"type {field.type}."
                )
        for key, (least, most) in RANGES.items():
            if not least <= getattr(self, key) <= most:
                raise ValueError(
                    f"kv_connector_extra_config: {key} = {getattr(self, key)} must be from {least} to {most}."
                )
        if self.handoff not in HANDOFF_CHOICES:
            raise ValueError(
                f"kv_connector_extra_config: handoff = {self.handoff!r} must be one of "
                f"{', '.join(HANDOFF_CHOICES)}."
            )
        if not self.endpoint.startswith(("unix:", "grpc://")):
            raise ValueError(
                f"kv_connector_extra_config: endpoint = {self.endpoint!r} must be unix:/path or grpc://host:port."
            )

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, object]) -> PluginSettings:
        """Read the mapping that vLLM passes through; a key that we do not know is an error."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in extra:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}."
                raise ValueError(f"kv_connector_extra_config: unknown key {key!r}; {hint}")
        if "endpoint" not in extra:
            raise ValueError(
                'kv_connector_extra_config: "endpoint" is missing: say where the daemon listens, '
                "for example unix:/run/kvservice/kv.sock."
            )
        return cls(**extra)  # type: ignore[arg-type]  # checked in __post_init__
