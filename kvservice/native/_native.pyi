from kvservice.core.slots import I64, U8, U32, U64
from kvservice.native.fallback import Buffer

STREAMING_THRESHOLD_BYTES: int

def crc32c(buffer: Buffer, value: int = 0) -> int: ...
def copy_blocks(
    targets: U64,
    sources: U64,
    lengths: U64,
    piece_counts: U32 | None,
    checksums: U32 | None,
    streaming_threshold_bytes: int = ...,
) -> None: ...
def checksum_blocks(sources: U64, lengths: U64, piece_counts: U32 | None, checksums: U32) -> None: ...
def buffer_address(obj: Buffer, writable: bool) -> tuple[int, int]: ...
def find_rows(table: Buffer, capacity: int, keys: Buffer, space: int, positions: I64) -> int: ...
def insert_rows(
    table: Buffer,
    capacity: int,
    keys: Buffer,
    space: int,
    segments: U32,
    granules: U32,
    length: int,
    checksums: U32,
    generations: U64,
) -> None: ...
def remove_rows(table: Buffer, capacity: int, keys: Buffer, spaces: U32) -> int: ...
def copy_rows(
    source_table: Buffer, source_capacity: int, target_table: Buffer, target_capacity: int
) -> None: ...
def read_rows(
    table: Buffer,
    capacity: int,
    keys: Buffer,
    space: int,
    segment_bases: U64,
    generation_bases: U64,
    targets: U64,
    lengths: U64,
    piece_counts: U32 | None,
    verify: bool,
    streaming_threshold_bytes: int,
    outcomes: U8,
    touched: I64,
) -> int: ...
def copy_slots(
    segments: U32,
    granules: U32,
    generations: U64,
    segment_bases: U64,
    segment_sizes: U64,
    generation_bases: U64,
    addresses: U64,
    lengths: U64,
    piece_counts: U32 | None,
    checksums: U32 | None,
    is_write: bool,
    streaming_threshold_bytes: int = ...,
) -> tuple[int, int]: ...

# Best first. For tests and for measuring one kernel against another.
def kernel_names() -> tuple[str, ...]: ...
def use_kernel(name: str, /) -> None: ...
