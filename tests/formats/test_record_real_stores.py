"""Records of real commitlogs as JSON equal what a Java client decoded, field by field."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.sweeps import sweep
from tests.truth import archived_messages, truth_directories
from tiered.formats.fields import FIELD_TABLE, INNER_FIELD_TABLE
from tiered.formats.record import decode_record, record_to_json
from tiered.model.queue import QueueKey

FIELD_NAMES = [field.name for field in FIELD_TABLE]
OPTIONAL = {field.name for field in FIELD_TABLE if field.optional}
NOT_IN_STORE_A = {"recCrc32", "offsetMsgId", "uniqKey"}
"""The truth of store A names these for some messages only."""


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *sweep([(name, 1) for name in ("A", "B", "C", "D", "E", "F", "G", "H", "H2", "K")], fast=()),
        *(("D", 3), ("E", 3), ("K", 1)),
    ],
)
def test_json_of_every_record_equals_the_truth(
    name: str, step: int, real_store: Callable[[str], Path]
) -> None:
    files = {
        int(file.name): file.read_bytes() for file in (real_store(name) / "store" / "commitlog").iterdir()
    }
    file_bytes = max(len(data) for data in files.values())
    compared = 0
    for truth in truth_directories(real_store(name)):
        for expected in islice(archived_messages(truth), 0, None, step):
            base = expected["commitLogOffset"] // file_bytes * file_bytes
            if base not in files:
                continue
            at = expected["commitLogOffset"] - base
            record = decode_record(files[base][at : at + expected["storeSize"]])
            queue = QueueKey(expected["topic"], expected["queueId"], 0)
            is_own_offset = expected.get("nonConsecutive", False)
            row = record_to_json(
                record, queue=queue, queue_offset=expected["queueOffset"], is_own_offset=is_own_offset
            )
            assert list(row) == [field for field in FIELD_NAMES if field in row]
            assert {field for field in FIELD_NAMES if field not in row} <= OPTIONAL
            assert all(
                set(item) == {field.name for field in INNER_FIELD_TABLE} for item in row.get("inner", [])
            )
            if name == "A":
                row = {
                    key: value for key, value in row.items() if key in expected or key not in NOT_IN_STORE_A
                }
            assert row == expected
            compared += 1
    assert compared >= 240
