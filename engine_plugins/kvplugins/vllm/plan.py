"""What the scheduler side tells the workers, once for each step of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockWork:
    """Blocks of one request to load or to save.

    keys: block keys, 32 bytes each.
    block_ids: the engine's own blocks, parallel to `keys`.
    daemon_incarnation: the life of the daemon that promised the blocks of a load; empty for a save.
    """

    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    daemon_incarnation: bytes = b""

    def __post_init__(self) -> None:
        """Refuse a map that is not one to one."""
        if len(self.keys) != len(self.block_ids):
            raise ValueError(
                f"request {self.request_id}: {len(self.keys)} keys for {len(self.block_ids)} blocks"
            )


@dataclass(slots=True)
class StepPlan:
    """One step's work, for all requests."""

    loads: list[BlockWork] = field(default_factory=list)
    saves: list[BlockWork] = field(default_factory=list)
