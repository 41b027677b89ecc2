"""What the doctor finds, as values and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wire:
    """One way for bytes to go.

    to: where: the daemon's arena, or another engine of this host.
    transport: its name. details: address, devices or lanes.
    why: why it is selected, or why it is not.
    write_gbps, read_gbps: large blocks, in 1e9 bytes a second; None where it was not measured.
    latency_us: one small block, read; None likewise.
    """

    to: str
    transport: str
    details: str
    is_usable: bool
    is_selected: bool
    why: str
    write_gbps: float | None = None
    read_gbps: float | None = None
    latency_us: float | None = None

    @property
    def slowest_gbps(self) -> float:
        """The lesser of what was measured; 0 where nothing was."""
        return min((rate for rate in (self.write_gbps, self.read_gbps) if rate is not None), default=0.0)


def render(wires: Sequence[Wire]) -> str:
    """Return a table, and a line for each way that says why."""
    lines: list[str] = []
    for to in dict.fromkeys(wire.to for wire in wires):
        lines.append(f"{to}:")
        lines.append(
            f"    {'':3}{'transport':10} {'write GB/s':>10} {'read GB/s':>10} {'latency us':>11}  details"
        )
        for wire in wires:
            if wire.to != to:
                continue
            mark = " * " if wire.is_selected else "   "
            numbers = f"{_number(wire.write_gbps):>10} {_number(wire.read_gbps):>10}"
            numbers += f" {_number(wire.latency_us):>11}"
            lines.append(f"    {mark}{wire.transport:10} {numbers}  {wire.details}".rstrip())
            lines.append(f"       {wire.why}")
    lines.append("(* is what is used)")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
