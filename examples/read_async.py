"""Reads all queues of a topic at the same time from an event loop.

    python examples/read_async.py s3://bucket/archive t_k_four

Any archive will do; `python examples/demo.py --keep` leaves one behind.
"""

from __future__ import annotations

import argparse
import asyncio

import rocketmq_tiered


async def count_messages(queue: rocketmq_tiered.AsyncQueue) -> tuple[int, int]:
    """(messages, bytes of their bodies) of one queue."""
    messages = body_bytes = 0
    async for message in queue.messages():
        messages += 1
        body_bytes += len(message.body)
    return messages, body_bytes


async def read_topic(url: str, topic: str) -> None:
    """Print a line for each queue of ``topic``."""
    async with rocketmq_tiered.open_async(url) as archive:
        queues = [archive.queue(topic, listing.queue_id) for listing in archive.queues(topic)]
        counts = await asyncio.gather(*map(count_messages, queues))
        for queue, (messages, body_bytes) in zip(queues, counts, strict=True):
            middle = (queue.min_offset + queue.max_offset) // 2
            stored_ms = await queue.timestamp_of(middle)
            print(
                f"{topic}/{queue.queue_id}: {messages} messages, {body_bytes} bytes; "
                f"offset {middle} was stored at {stored_ms}"
            )


def main() -> None:
    """Read one topic."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="file:///directory or s3://bucket/prefix")
    parser.add_argument("topic")
    options = parser.parse_args()
    asyncio.run(read_topic(options.url, options.topic))


if __name__ == "__main__":
    main()
