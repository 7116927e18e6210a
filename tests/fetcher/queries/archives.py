"""Archives of real stores, made once, and what must be found in them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end.ground_truth import read_jsonl
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, backfill
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.formats.keys import archive_prefix
from tiered.formats.record import MAGIC_V1, MAGIC_V2, Record, decode_record
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings, OffloadSettings

TRUTH_OF_ROUND = {"H": "after2", "H2": "after2"}
SETTINGS = OffloadSettings(batch_bytes=1 << 20, split_bytes=256 << 10, block_bytes=64 << 10, root_every=4)


@dataclass
class RealArchive:
    """An archive of a real store. ``directory`` holds store and truth."""

    directory: Path
    store: ObjectStore
    state: CatalogState
    name: str

    def truth(self, file: str) -> list[dict[str, Any]]:
        """Lines of one truth file, archived topics only."""
        path = self.directory / "truth" / TRUTH_OF_ROUND.get(self.name, "")
        return [
            line
            for line in read_jsonl(path / f"{file}.jsonl.zst")
            if "topic" not in line or FILTER.admits(line["topic"])
        ]

    def compacted(self) -> set[str]:
        """COMPACTION topics: the broker answers for them from positions in its compacted copy."""
        return {line["topic"] for line in self.truth("topics") if "COMPACTION" in str(line)}


_made: dict[tuple[str, bool], RealArchive] = {}


def archive_of(name: str, real_store: Callable[[str], Path], *, indexed: bool = True) -> RealArchive:
    """The archive of store ``name``, of many small objects, with index files or without any."""
    if (name, indexed) not in _made:
        directory = real_store(name)
        root = MemoryStore(f"memory://{name}-{indexed}")
        # A little memory only: many index files are made, and merged.
        settings = IndexSettings(enabled=indexed, after_backfill=True, memory_bytes=1 << 20, day_files_max=3)
        backfill(directory / "store", root, settings=SETTINGS, index_settings=settings)
        store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
        _made[name, indexed] = RealArchive(directory, store, load(store), name)
    return _made[name, indexed]


def records_at(archive: RealArchive, physical: list[int]) -> dict[int, Record]:
    """Records of the broker's own commitlog."""
    log = CommitLog([archive.directory / "store" / "commitlog"])
    found = {}
    for phys in physical:
        size = int.from_bytes(log.read(phys, 4), "big")
        found[phys] = decode_record(log.read(phys, size))
    return found


def records_of_log(archive: RealArchive) -> Iterator[Record]:
    """Every record of the broker's own commitlog, in order."""
    for file in CommitLog([archive.directory / "store" / "commitlog"]).files:
        data, at = file.path.read_bytes(), 0
        while at + 8 <= len(data):
            size, magic = (
                int.from_bytes(data[at : at + 4], "big"),
                int.from_bytes(data[at + 4 : at + 8], "big"),
            )
            if size == 0 or magic not in (MAGIC_V1, MAGIC_V2):
                break
            yield decode_record(data[at : at + size])
            at += size
