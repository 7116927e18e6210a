"""Writes index files, puts them, and commits what they cover."""

import logging
import mmap
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from tiered.archive.index.footer import Covered, IndexMeta
from tiered.archive.index.layout import Form
from tiered.archive.index.places import Places
from tiered.archive.index.writer import write_index
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.index_refs import IndexChange, IndexRef, with_unindexed
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.errors import UnavailableError
from tiered.formats.keys import epoch_of, index_key
from tiered.model.tables import Table
from tiered.settings.sections import IndexSettings
from uploader.index_input import IndexInput, Unread, work_disk

logger = logging.getLogger(__name__)

UPLOAD_BYTES_PER_S_MIN = 1 << 20
TIMEOUT_S_MIN = 60.0
SPOOL_BYTES = 16 << 20
"""An index file up to this size is kept in memory, and not written to the local disk."""


@dataclass
class IndexCounters:
    """Counts so far; read by status without a lock."""

    files: int = 0
    items: int = 0
    merges: int = 0
    attempts_abandoned: int = 0
    excluded: int = 0
    """Segments that could not be read."""
    rebuilt: int = 0
    """Damaged files that were rebuilt."""


class IndexFiles:
    """Writes the index files of one builder, puts them, and commits them."""

    def __init__(
        self,
        maintenance: MaintenanceCommit,
        settings: IndexSettings,
        source: IndexInput,
        *,
        nonce: str,
    ) -> None:
        """``source`` knows which segments are damaged; ``nonce``, a part of keys, belongs to one process, so that no
        key is used twice."""
        self._maintenance, self._settings, self._input = maintenance, settings, source
        self._nonce = nonce
        self._made = 0
        self.counters = IndexCounters()

    @property
    def unnamed(self) -> Sequence[str]:
        """Keys of files that may exist, and that no commit names."""
        return self._maintenance.unnamed

    @property
    def _spool_bytes(self) -> int:
        """How much of a file is kept in memory. It is there twice while it is sent, and its items once while it is
        written."""
        return min(SPOOL_BYTES, self._settings.memory_bytes // 4)

    def put(
        self,
        state: CatalogState,
        meta: IndexMeta,
        chunks: Iterable[Table],
        places: Iterable[Places],
        covered: Covered,
        form: Form,
        *,
        level: int,
    ) -> IndexRef:
        """Write one index file to a temporary file, put it, and return its entry for the catalog, which the caller
        commits. ``chunks``: its items in order; ``places``: of the messages; ``covered``: its objects. Raises
        UnavailableError if the local disk or the store fails."""
        self._made += 1
        key = index_key(meta.begin_ms, meta.end_ms, state.epoch, f"{self._nonce}_{self._made}")
        with work_disk("a temporary index file"), tempfile.SpooledTemporaryFile(self._spool_bytes) as spool:
            shape = write_index(spool, key, chunks, meta, covered, form, places)
            self._send(key, spool, shape.size_bytes)
        return IndexRef(
            key,
            level,
            meta.from_version,
            meta.to_version,
            meta.begin_ms,
            meta.end_ms,
            meta.begin_phys,
            meta.end_phys,
            shape.items,
            shape.slot_bits,
            shape.widths,
            len(covered.objects),
            shape.size_bytes,
            shape.tail_bytes,
        )

    def _send(self, key: str, spool: IO[bytes], size_bytes: int) -> None:
        """Put the index file in ``spool`` under ``key``, with a timeout by its size. A failed PUT is counted and
        raised; its key is never used again."""
        timeout_s = max(TIMEOUT_S_MIN, size_bytes / UPLOAD_BYTES_PER_S_MIN)
        spool.flush()
        try:
            if size_bytes <= self._spool_bytes:
                spool.seek(0)
                self._maintenance.put(key, [spool.read()], timeout_s=timeout_s)
                return
            # Not closed here: an abandoned upload may still hold a view of it.
            mapped = mmap.mmap(spool.fileno(), size_bytes, access=mmap.ACCESS_READ)
            self._maintenance.put(key, [memoryview(mapped)], timeout_s=timeout_s)
        except UnavailableError:
            self.counters.attempts_abandoned += 1
            raise

    def publish(
        self,
        refs: Sequence[IndexRef],
        *,
        removed: Sequence[str],
        damaged: Sequence[Unread] = (),
        divided_at: int | None = None,
    ) -> bool:
        """Commit that the index files ``refs`` cover their versions, but for the ``damaged`` segments, and replace the
        files ``removed``. False if another actor has changed the index before: then the new files are garbage.

        ``divided_at``: they divide versions, whose runs were found at this version of the catalog, in another way than
        before. If compaction has joined runs since, nothing is committed: it never joins those of two index files."""
        excluded: dict[str, list[int]] = {}
        for unread in damaged:
            excluded.setdefault(unread.segment.key, []).append(unread.segment.version)
        stale, self._input.stale = self._input.stale, {}

        def change(state: CatalogState) -> CommitDraft:
            """The commit after ``state``."""
            return CommitDraft(
                CommitKind.MAINTENANCE,
                index=IndexChange(list(refs), list(removed)),
                settings=with_unindexed(state.unindexed, excluded, stale),
            )

        required = Requirements(
            epoch=epoch_of(refs[0].key),
            index_files=frozenset(removed),
            indexed_version=None if removed else refs[0].from_version - 1,
            uncompacted_since=divided_at,
        )
        if not self._maintenance.commit(change, required):
            return False
        self.counters.excluded += len(damaged)
        for unread in damaged:
            logger.warning(
                "a damaged segment is excluded from the index: queries read its keys themselves",
                extra={"segment": unread.segment.key, "error": str(unread.error)},
            )
        return True
