"""The cold-read benchmark's own checks notice whatever is not as it should be."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from benchmarks.cold_read_checks import WrongAnswerError, check_body, check_offsets
from fetcher.rows.message import MessageBatch


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
