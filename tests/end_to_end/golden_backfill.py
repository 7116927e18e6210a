"""Golden backfills: digests of everything that the backfill of a real store archives.

``python -m tests.end_to_end.golden_backfill K <its store> …`` prints ``tests/data/golden/backfill.json``. Excluded is
what depends on the timing of threads: which catalog version a segment's writer had seen, numbers of attempts, and
with them sizes and checksums of tails, and put ids.
"""

import hashlib
import json
import random
import struct
import sys
from itertools import count
from pathlib import Path
from unittest import mock

from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.formats.golden_archive import GOLDEN
from tiered.catalog.catalog_reader import load, read_commit
from tiered.clock import Clock
from tiered.formats.container import decode_container
from tiered.formats.keys import archive_prefix
from tiered.formats.segment_layout import FOOTER_KIND
from tiered.model.tables import Table
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings
from uploader.offload import Environment

FILE = GOLDEN / "backfill.json"
STORES = ("C", "K")
TRAILER_BYTES = 48
NOW_MS = 1_700_000_000_000
TIMED = ("tail_crc32c", "tail_bytes", "size_bytes")


def digests(store: Path) -> dict[str, str]:
    """Digest of every object by key, and of every commit of data by its place in the log."""
    root = MemoryStore()
    seeds = count(1)
    with mock.patch("random.SystemRandom", lambda: random.Random(next(seeds))):
        backfill(
            store,
            root,
            environment=Environment(clock=Clock(wall_ms=lambda: NOW_MS)),
            index_settings=IndexSettings(day_files_max=2),
        )
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    found = {}
    for info in archive.list(""):
        kind = info.key.partition("/")[0]
        if kind in ("data", "sets"):
            found[_without_attempt(info.key)] = _of_segment(archive.get(info.key))
        elif kind in ("index", "state"):
            found[_without_attempt(info.key)] = _digest(archive.get(info.key))
    for version in range(1, load(archive).version + 1):
        draft = read_commit(archive, version).draft
        tables = (draft.runs, _without(draft.objects, TIMED), draft.gaps)
        places = [list(draft.queues), draft.hide, sorted(draft.state_objects), len(draft.index.added)]
        found[f"commit {draft.kind} {draft.from_phys}-{draft.to_phys} {version}"] = _digest(
            json.dumps([*places, draft.check]).encode(), *(table.tobytes() for table in tables)
        )
    return found


def _without_attempt(key: str) -> str:
    directory, _, name = key.rpartition("/")
    parts = name.split("-")
    return f"{directory}/{'-'.join(parts[:1] if directory.startswith(('data', 'sets', 'state')) else parts)}"


def _of_segment(data: bytes) -> str:
    tail_offset, footer_offset = struct.unpack_from("<QQ", data, len(data) - TRAILER_BYTES)
    footer = decode_container(data[footer_offset:-TRAILER_BYTES], FOOTER_KIND, source="golden")
    meta = footer.header["meta"]
    del meta["catalog_version"], meta["attempt"]
    header = json.dumps([tail_offset, footer_offset, footer.header], sort_keys=True).encode()
    tables = (name.encode() + table.tobytes() for name, table in sorted(footer.tables.items()))
    return _digest(data[:footer_offset], header, *tables)


def _without(table: Table, columns: tuple[str, ...]) -> Table:
    table = table.copy()
    for name in columns:
        table[name] = 0
    return table


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


if __name__ == "__main__":
    places = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    print(json.dumps({name: digests(Path(store)) for name, store in places}, indent=1))
