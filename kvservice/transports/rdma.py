"""Which RDMA devices this host has, and whether UCX in this process would use them."""

from __future__ import annotations

from pathlib import Path

_DEVICES = Path("/sys/class/infiniband")
_MAPPED = Path("/proc/self/maps")
_VERBS_MODULE = "libuct_ib"
"""UCX loads it with its first worker, where it was built with verbs: the package libucx-cu12 was not."""


def rdma_devices(folder: Path = _DEVICES) -> tuple[str, ...]:
    """Return the devices that have an active port, by name; none where there is none."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ()
    return tuple(name for name in names if _is_active(folder / name))


def usable_devices(names: str) -> tuple[str, ...]:
    """Return the devices that UCX in this process can use, which has opened a worker before.

    names: network devices as UCX_NET_DEVICES takes them; "" for any.
    """
    try:
        has_verbs = _VERBS_MODULE in _MAPPED.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    if not has_verbs:
        return ()
    asked = {device.partition(":")[0] for lane in names.split(";") for device in lane.split(",") if device}
    return tuple(name for name in rdma_devices() if not asked or name in asked)


def _is_active(device: Path) -> bool:
    for port in sorted((device / "ports").glob("*/state")):
        try:
            if "ACTIVE" in port.read_text(encoding="ascii", errors="replace"):
                return True
        except OSError:
            continue
    return False
