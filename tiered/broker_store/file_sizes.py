"""Sizes of a broker's files, which it keeps for good: a store of other sizes is not one that it continues."""

import os
from collections.abc import Iterator
from pathlib import Path

from tiered.broker_store.store import BrokerStore

QUEUES = "consumequeue"


def commitlog_file_bytes(store: BrokerStore) -> int:
    """The size of the store's commitlog files; 0 without files. It is that of the largest, as the last file of a log
    may be shorter."""
    return max((file.size_bytes for file in store.commit_log.files), default=0)


def consume_queue_file_bytes(store: BrokerStore) -> int:
    """The size of the files of the store's consume queues; 0 if it has none, as they are in RocksDB."""
    return file_bytes_in(store.path / QUEUES)


def file_bytes_in(directory: Path) -> int:
    """Size of a broker's files in ``directory`` or below; 0 without files."""
    return next(_sizes(directory), 0)


def _sizes(root: Path) -> Iterator[int]:
    """The sizes in bytes of the files below ``root`` whose names are numbers. A directory that cannot be read ends
    them."""
    try:
        for directory, folders, names in os.walk(root):
            folders.sort()
            yield from (
                size
                for name in sorted(names)
                if name.isdecimal()
                if (size := (Path(directory) / name).stat().st_size)
            )
    except OSError:
        return  # the sizes of other files are not known
