"""Ground truth of a real store for queries by key, id and time."""

from __future__ import annotations

from typing import Any

from tests.fetcher.queries.archives import RealArchive, records_of_log
from tiered.formats.record import Record

SYS_COMMITTED = 0x8


class Truth:
    """Every record of the broker's own commitlog that it shows; the answer to a query from these alone."""

    def __init__(self, archive: RealArchive) -> None:
        self._records: dict[str, list[Record]] = {}
        for record in records_of_log(archive):
            if record.sys_flag & 0xC in (0, SYS_COMMITTED):
                self._records.setdefault(record.topic, []).append(record)

    def physical_offsets(self, line: dict[str, Any]) -> list[int]:
        """All matches of a recorded query, newest first."""
        return [
            record.physical_offset
            for record in reversed(self._records.get(line["topic"], []))
            if is_key_of(record, line) and line["begin"] <= record.store_timestamp <= line["end"]
        ]


def is_key_of(record: Record, line: dict[str, Any]) -> bool:
    """Whether the record carries the requested key."""
    return record.topic == line["topic"] and line["key"] in (*record.keys, record.uniq_key)
