"""Messages by key and id from the broker's own files: IndexFiles locate them, the commitlog confirms them.

A broker's index has hashes of 31 bits and whole seconds, names deleted or truncated records, and is written while it is
read. So every record it names is read, checked, and compared with topic, key and time in full. Blocks for as long as
the disk takes. Sources: IndexService.queryOffset, DefaultMessageStore.queryMessage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from fetcher.policy.local_records import RECORD_BYTES_MIN, checked_timestamp
from fetcher.queries.by_id import OffsetMsgId
from fetcher.queries.by_key import KeyQuery, Position, carries
from tiered.archive.index.rocketmq_index_file import (
    DEFAULT_ITEMS,
    DEFAULT_SLOTS,
    BrokerIndex,
    file_bytes,
)
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.store import BrokerStore
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.formats.record import Record, decode_record

LOG = logging.getLogger(__name__)

INDEX_DIRECTORY: Final = "index"
TAIL_BYTES_MAX: Final = 64 * 1024 * 1024
"""Commitlog that is read from the last indexed record on, at most."""
_SLOTS_KEY, _ITEMS_KEY = "maxHashSlotNum", "maxIndexNum"


class BrokerSideQueries:
    """Queries one broker's store directory. Not thread-safe. The caller closes the store."""

    def __init__(self, store: BrokerStore) -> None:
        """Raises UsageError when the store's index files are not of the sizes that its broker.conf says."""
        self._store = store
        self._directory = store.path / INDEX_DIRECTORY
        self._slots = _slots_of(self._directory, store.conf)

    def earliest_ms(self) -> int:
        """Store time of the oldest record the broker has, ms since the epoch; -1 when there is none."""
        for file in self._store.commit_log.files:
            record = None if file.is_pinned else self.record_at(file.begin_phys)
            if record is not None:
                return record.store_timestamp
        return -1

    def by_key(
        self, query: KeyQuery, is_wanted: Callable[[Record], bool] = lambda _: True, *, archived_phys: int = 0
    ) -> list[Record]:
        """Records that match and are wanted, newest first: the last ``query.max_messages`` of the log, which are the
        newest unless the broker's clock was set back; pages of a query are not continued here. Records after the
        last indexed one and ``archived_phys`` are searched in the log itself.

        Raises CorruptionError for an impossible index file, UnavailableError naming a file.
        """
        begin_phys = max(archived_phys, self._store.commit_log.broker_min_phys)
        found: dict[int, Record] = {}
        with self._index() as index:
            # The newest file may have no item yet.
            begin_phys = max([begin_phys, *(file.end_phys for file in index.files)])
            for record in self._records_from(begin_phys):
                if carries(record, query) and is_wanted(record):
                    found[record.physical_offset] = record
            for phys in index.candidates(query.topic, query.key, query.begin_ms, query.end_ms):
                if len(found) >= query.max_messages:
                    break
                known = None if phys in found else self.record_at(phys)
                if known is not None and carries(known, query) and is_wanted(known):
                    found[phys] = known
        newest_first = sorted(found.values(), key=Position.of_record, reverse=True)
        return newest_first[: query.max_messages]

    def _index(self) -> BrokerIndex:
        """The current index files; none if the broker writes none."""
        try:
            return BrokerIndex(self._directory, self._slots)
        except NotFoundError:
            return BrokerIndex.empty()

    def _records_from(self, phys: int) -> Iterator[Record]:
        """Records of the log from ``phys`` on: what the broker has not indexed yet, or has no index for."""
        log = self._store.commit_log
        log.refresh()
        left_bytes = TAIL_BYTES_MAX
        for file in log.files:
            at = max(phys, file.begin_phys)
            while not file.is_pinned and at < file.end_phys and (record := self.record_at(at)) is not None:
                yield record
                at += len(record.data)
                left_bytes -= len(record.data)
                if left_bytes < 0:
                    LOG.warning(
                        "%s ends at %d of the commitlog: only %d bytes from there on are searched",
                        self._directory, phys, TAIL_BYTES_MAX,
                    )  # fmt: skip
                    return

    def by_id(self, wanted: OffsetMsgId) -> Record | None:
        """The record at an offsetMsgId, or None. Raises UnavailableError naming a file."""
        record = self.record_at(wanted.phys)
        return record if record is not None and wanted.text in ("", record.offset_msg_id) else None

    def record_at(self, phys: int) -> Record | None:
        """The record that begins at ``phys``; None when there is none, or it is not whole."""
        log = self._store.commit_log
        if phys < 0:
            return None
        if phys >= log.max_file_end:
            log.refresh()
        size = log.record_size_at(phys)
        file = log.file_at(phys)
        if size is None or file is None or not RECORD_BYTES_MIN <= size <= file.end_phys - phys:
            return None
        data = log.read(phys, size)
        if len(data) != size or checked_timestamp(memoryview(data), phys, None) is None:
            return None
        try:
            return decode_record(data)
        except CorruptionError:
            return None  # an index that speaks of a log cut back since is no error of the log


def _slots_of(directory: Path, conf: BrokerConf | None) -> int:
    """Slots of each index file, by the broker's configuration, as the files do not record them."""
    properties = conf.properties if conf is not None else {}
    try:
        slots = int(properties.get(_SLOTS_KEY, DEFAULT_SLOTS))
        items = int(properties.get(_ITEMS_KEY, DEFAULT_ITEMS))
    except ValueError as error:
        raise UsageError(f"{_SLOTS_KEY} or {_ITEMS_KEY} of broker.conf is not a number: {error}") from error
    if slots < 1 or items < 1:
        raise UsageError(f"{_SLOTS_KEY} is {slots}, {_ITEMS_KEY} {items}", hint="check broker.conf")
    try:
        sizes = {path.stat().st_size for path in directory.iterdir() if path.name.isdigit()}
    except FileNotFoundError:
        return slots
    if not sizes <= {file_bytes(slots, items)}:
        raise UsageError(
            f"index files in {directory} do not have {slots} slots and {items} items ({min(sizes)} bytes)",
            hint=f"pass the broker's broker.conf with {_SLOTS_KEY} and {_ITEMS_KEY}",
        )
    return slots
