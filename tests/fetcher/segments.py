"""Segments of random records for tests of the block source: one run, blocks of a few KiB, raw bytes known."""

import random
from dataclasses import dataclass
from functools import cached_property

from tests.formats.segment_builder import RowSpec, RunSpec, build, whole
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind


@dataclass(frozen=True)
class Segment:
    """An object's bytes, and what its blocks hold."""

    key: str
    content: bytes
    tail_bytes: int
    raw: bytes

    @cached_property
    def index(self) -> SegmentIndex:
        """Its tail, decoded."""
        return SegmentIndex(self.key, len(self.content), self.content[-self.tail_bytes :])

    def span(self, block: int) -> BlockSpan:
        """Where a block is."""
        return self.index.span_of_blocks(0, block, block + 1)

    def block(self, number: int) -> bytes:
        """Its raw bytes."""
        span = self.span(number)
        return self.raw[span.raw_offset : span.raw_offset + span.raw_bytes]


def segment(
    key: str, *, blocks: int = 16, block_bytes: int = 4096, noise: float = 0.5, seed: int = 0
) -> Segment:
    """About ``blocks`` blocks; ``noise`` is the share of each record that does not compress."""
    rng = random.Random(f"{key}{seed}")
    size = block_bytes // 4
    records = [rng.randbytes(int(size * noise)).ljust(size, b"r") for _ in range(4 * blocks)]
    queue = QueueKey("topic", 0, 0)
    spec = RunSpec(0, 0, [RowSpec(content=record) for record in records], RunKind.PLAIN, 0, 0)
    encoded = build([queue], [spec], shuffle_seed=seed).encode(BlockCodec(block_bytes=block_bytes))
    return Segment(key, whole(encoded), encoded.tail_bytes, b"".join(records))
