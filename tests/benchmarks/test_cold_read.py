"""How cold reads are judged, and what is read of the peer's answer.

The cold-read benchmark's own checks notice whatever is not as it should be.
"""

import struct
from typing import Any

import numpy as np
import pytest

from benchmarks.cold_read_checks import WrongAnswerError, check_body, check_offsets
from benchmarks.cold_read_report import summarize
from fetcher.rows.message import MessageBatch


def rows(
    rate: int = 900_000, cpu_us: float = 2.0, requests: float = 1.1, cold: int = 2, twice: float = 0.0
) -> list[dict[str, Any]]:
    """One run of one store: parts at 1 M messages/s, the peer at 100 k by default and 300 k at best."""
    common: dict[str, Any] = {"store": "B", "others_cores": 0.1}
    own = common | {"target": "file", "run": 0, "peak_rss_mib": 200}
    sequential = {
        "messages_per_s": rate,
        "cpu_us_per_message": cpu_us,
        "requests_of_ideal": requests,
        "requests_per_gib": 300,
        "fetched_twice": twice,
    }
    latency = {"p50_ms": 1.0, "p99_ms": 3.0, "cold_requests_max": cold, "warm_requests_max": 0}
    bare = {"p50_ms": 0.5, "p99_ms": 2.0}
    peer = common | {"what": "peer", "peak_rss_mib": 900}
    found = [
        own | {"what": "parts", "messages_per_s": 1_000_000, "cpu_us_per_message": 1.0, "bare_get": bare}
    ]
    found += [own | {"what": "ours", "read": read} | sequential for read in ("walk-1", "walk-16")]
    for read in ("seq-1", "seq-16"):
        found.append(own | {"what": "ours", "read": read} | sequential)
        found.append(peer | {"read": read, "messages_per_s": 100_000, "cpu_us_per_message": 14.0})
        found.append(
            peer | {"read": f"{read}-cache-off", "messages_per_s": 300_000, "cpu_us_per_message": 5.0}
        )
    found += [own | {"what": "ours", "read": read} | latency for read in ("random", "time")]
    return found


def test_everything_within_its_target_misses_nothing() -> None:
    (summary,) = summarize(rows())
    assert summary["missed"] == []
    assert summary["checks"]["seq-16 times peer's best"]["value"] == 3.0
    assert summary["checks"]["seq-1 times peer's default"]["value"] == 9.0
    assert summary["checks"]["seq-1 CPU of peer's"]["value"] == 0.4


def test_every_target_can_be_missed() -> None:
    (summary,) = summarize(rows(rate=450_000, cpu_us=3.0, requests=1.4, cold=3, twice=0.02))
    missed = set(summary["missed"])
    assert {"seq-1 of parts", "seq-16 times peer's best", "seq-16 times peer's default"} <= missed
    assert {"seq-1 CPU of peer's", "seq-1 requests of ideal"} <= missed
    assert {"walk-1 of parts", "walk-16 requests of ideal", "walk-16 bytes fetched twice"} <= missed
    assert {"random requests, cold", "time requests, cold"} <= missed


def records(first: int, sizes: list[int]) -> bytes:
    """Records of these sizes, with the fields that the checks read."""
    return b"".join(
        struct.pack(">i16xq", size, first + number) + bytes(size - 28) for number, size in enumerate(sizes)
    )


def test_records_back_to_back_in_several_parts() -> None:
    whole = memoryview(records(7, [28, 40, 33, 100]))
    check_body([whole], 4, 7)
    check_body([whole[:68], whole[68:]], 4, 7)
    check_body([], 0, 7)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (records(8, [28, 40]), 2),
        (records(7, [28, 40]), 3),
        (records(7, [28, 40])[:-1], 2),
        (records(7, [28, 40]) + bytes(27), 2),
        (records(7, [28]) + records(7, [28]), 2),
        (records(7, [28]) + struct.pack(">i16xq", 0, 8), 2),
        (records(7, [28]) + struct.pack(">i16xq", -5, 8), 2),
        (records(7, [28])[:10], 1),
    ],
)
def test_other_offsets_counts_and_cuts_are_noticed(data: bytes, count: int) -> None:
    with pytest.raises(WrongAnswerError, match="from 7 on"):
        check_body([memoryview(data)], count, 7)


def test_a_batch_whose_records_say_other_offsets_is_noticed() -> None:
    data = np.frombuffer(records(7, [28, 40]), np.uint8)

    def batch(first: int) -> MessageBatch:
        offsets, none = np.arange(first, first + 2), np.zeros(2, np.int64)
        sizes = np.array([28, 40], np.int32)
        return MessageBatch(
            (data,),
            np.zeros(2, np.int32),
            np.array([0, 28]),
            sizes,
            offsets,
            np.ones(2, np.int32),
            none,
            none,
            none,
        )

    check_offsets(batch(7), 7)
    with pytest.raises(WrongAnswerError):
        check_offsets(batch(7), 8)
    with pytest.raises(WrongAnswerError):
        check_offsets(batch(8), 8)
