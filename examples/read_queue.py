"""Reads one queue of an archive: where it begins and ends, from a time on, message by message and batch by batch.

    python examples/read_queue.py file:///tmp/archive t_k_one 0

Any archive will do; `python examples/demo.py --keep` leaves one behind.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

import rocketmq_tiered


def main() -> None:
    """Print what the queue holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="file:///directory or s3://bucket/prefix")
    parser.add_argument("topic")
    parser.add_argument("queue_id", type=int)
    options = parser.parse_args()
    with rocketmq_tiered.open(options.url) as archive:
        queue = archive.queue(options.topic, options.queue_id)
        print(f"{queue.topic}/{queue.queue_id}: offsets {queue.min_offset} to {queue.max_offset - 1}")

        earliest_ms = queue.earliest_time()
        if earliest_ms is None:
            return
        # The first three messages stored at or after a time; a datetime does as well as milliseconds.
        since = datetime.fromtimestamp(earliest_ms / 1000 + 1, UTC)
        print(f"since {since:%H:%M:%S.%f}: from offset {queue.offset_by_time(since)}")
        for message in queue.messages(since=since, limit=3):
            # Nothing is decoded before it is looked at: here the properties, and the body.
            print(
                f"  {message.queue_offset} tags={message.tags} keys={list(message.keys)} {len(message.body)} bytes"
            )

        # In bulk: arrays over the broker's own bytes, no object for each message.
        messages = size_bytes = 0
        for batch in queue.batches(batch_messages=4096):
            messages += len(batch)
            size_bytes += int(batch.sizes.sum())
        print(f"all: {messages} messages, {size_bytes} bytes")


if __name__ == "__main__":
    main()
