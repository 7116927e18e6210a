"""An archive of two generations of a queue, for group offsets."""

from rocketmq_tiered.server.backend.backend import Bounds, TopicConfig


class Archive:
    """Offsets 10 to 29 of the only queue of t, stored at ten times their number; group g was at 15 at its broker."""

    cluster, broker = "c", "b"

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 1, 1)}

    def bounds(self, topic: str, queue_id: int) -> Bounds:
        return Bounds(10, 30)

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        return 15 if group == "g" else None

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        return min(max(store_ms // 10, 10), 30)
