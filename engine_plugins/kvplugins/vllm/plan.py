"""What the scheduler side tells the workers, once for each step of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvclient import LentPool


@dataclass(frozen=True, slots=True)
class HandoffWork:
    """Where the blocks of a load wait in another engine.

    handoff_ids: a handoff for each rank.
    first_key: the first of the load's blocks, among those handed over.
    """

    handoff_ids: tuple[int, ...]
    first_key: int


@dataclass(frozen=True, slots=True)
class BlockWork:
    """Blocks of one request to load or to save.

    keys: block keys, 32 bytes each.
    block_ids: the engine's own blocks, parallel to `keys`.
    daemon_incarnation: the life of the daemon that promised the blocks of a load; empty for a save.
    handoff: whence to load them; None where they come from the store.
    """

    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    daemon_incarnation: bytes = b""
    handoff: HandoffWork | None = None

    def __post_init__(self) -> None:
        """Refuse a map that is not one to one."""
        if len(self.keys) != len(self.block_ids):
            raise ValueError(
                f"request {self.request_id}: {len(self.keys)} keys for {len(self.block_ids)} blocks"
            )


@dataclass(slots=True)
class StepPlan:
    """One step's work, for all requests.

    released: finished requests whose blocks were handed over, and may be used again.
    known_layouts: rank -> the layout that the scheduler would offer out of. A worker whose memory is lent by
        another says so after the step: nothing has to arrive exactly once.
    """

    loads: list[BlockWork] = field(default_factory=list)
    saves: list[BlockWork] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    known_layouts: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankLent:
    """The KV memory of one rank, as the daemon knows it.

    daemon_incarnation: the life of the daemon that knows it so.
    is_host: whether it is host memory.
    """

    daemon_incarnation: bytes
    pool: LentPool
    is_host: bool
