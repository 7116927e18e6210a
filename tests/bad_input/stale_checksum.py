"""A store with a record whose checksum does not fit."""

import shutil
from pathlib import Path

from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import FILTER
from tiered.broker_store.commit_log import CommitLog

NAME = "B"


STALE = b"\x02__CRC32#\x011234567890\x02"
"""The end of a record's properties as a copy from a broker that appends checksums has it, wrong where it is now."""


def stale_copies(directory: Path) -> list[dict[str, object]]:
    """Records whose last property is no tag and long enough to be overwritten by STALE."""
    log = CommitLog([directory / "store" / "commitlog"])
    found = []
    for lines in load_truth(directory, NAME, FILTER).queues.values():
        for line in lines:
            record = log.read(line["commitLogOffset"], line["storeSize"])
            if record[-len(STALE) - 1 :].count(b"\x01") == 0 and b"TAGS\x01" not in record[-64:]:
                found.append(line)
    return found


def copy_with_stale_checksum(directory: Path, store: Path) -> tuple[dict[str, object], CommitLog]:
    """A copy of the store at ``store`` in which one record ends as STALE does; that record, and the copy's log."""
    victim = stale_copies(directory)[7]
    shutil.copytree(directory / "store", store)
    log = CommitLog([store / "commitlog"])
    phys, size = int(str(victim["commitLogOffset"])), int(str(victim["storeSize"]))
    file = log.file_at(phys)
    assert file is not None
    with file.path.open("r+b") as opened:
        opened.seek(phys + size - len(STALE) - file.begin_phys)
        opened.write(STALE)
    return victim, log
