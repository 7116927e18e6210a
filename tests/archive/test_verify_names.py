"""Verification by listing: finds what is missing, follows the chain, and takes requests for pages and listings only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.formats.golden_archive import GOLDEN
from tests.object_store.fault_store import FaultStore
from tiered.archive import verify_progress
from tiered.archive.verify import verify_archive
from tiered.archive.verify_progress import VerifyProgress
from tiered.archive.verify_segment import AnomalyKind
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import UnavailableError, UsageError
from tiered.formats.keys import catalog_key
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.interface import GET_BYTES_MAX, ObjectInfo
from tiered.object_store.memory import MemoryStore

ONE, TWO = QueueKey("one", 0, 0), QueueKey("two", 1, 0)


def built(cycles: int) -> ArchiveBuilder:
    small = CatalogLimits(root_every=8, root_runs_max=8, page_runs_max=32, merge_sequences=4, merge_spills=4)
    made = ArchiveBuilder(MemoryStore(), limits=small)
    for cycle in range(cycles):
        made.commit([Sent(ONE), Sent(TWO)], as_set=cycle % 2 == 0)
    return made


def from_version(version: int) -> VerifyProgress:
    """After a clean pass over ``version``."""
    saved = VerifyProgress()
    saved.verified = version, ""
    return saved


def test_the_golden_archive_is_clean() -> None:
    store = FileStore(GOLDEN / "1.0" / "archive")
    report = verify_archive(store, saved=from_version(1), depth="names")
    assert (report.anomalies, report.leftovers) == ([], [])
    whole = verify_archive(store, depth="full")
    for name in ("versions", "queues", "objects"):
        assert report.counts[name] == whole.counts[name]


def test_requests_follow_pages_not_commits_nor_objects() -> None:
    made = built(640)
    made.writer.release()
    store = FaultStore(made.store, (), wait=lambda seconds: None)
    report = verify_archive(store, depth="names")
    assert (report.anomalies, report.leftovers) == ([], [])
    assert report.counts["objects"] > 900 and report.counts["versions"] > 640
    gets = [request for request in store.requests if request.operation.startswith("get")]
    assert len(gets) <= len(made.writer.state.pages) + 32 + 640 / 32
    assert len({request.key for request in gets}) >= 3


def test_a_missing_object_and_one_of_another_size_are_named() -> None:
    made = built(60)
    gone, cut = made.keys[3], made.keys[40]
    content = made.store.get(cut, 1 << 30)
    made.store.delete([gone, cut])
    made.store.put_if_absent(cut, [content[:-1]])
    found = verify_archive(made.store, depth="names").anomalies
    assert {(anomaly.kind, anomaly.key) for anomaly in found} == {
        (AnomalyKind.MISSING, gone),
        (AnomalyKind.MISSING, cut),
    }


def test_a_missing_commit_is_found_by_its_name() -> None:
    made = built(60)
    made.store.delete([catalog_key(7), catalog_key(8), catalog_key(1)])
    found = [(anomaly.key, anomaly.detail) for anomaly in verify_archive(made.store, depth="names").anomalies]
    assert (catalog_key(8), "versions 7 to 8 are missing") in found
    assert (catalog_key(1), "version 1 is missing") in found


def test_another_commit_in_the_chain_is_found_since_a_version() -> None:
    made, other = built(60), built(60)
    key = catalog_key(9)
    content = other.store.get(catalog_key(10), 1 << 30)
    made.store.delete([key])
    made.store.put_if_absent(key, [content])
    assert verify_archive(made.store, depth="names").anomalies == []  # before the newest root: --full
    assert {
        anomaly.key for anomaly in verify_archive(made.store, saved=from_version(5), depth="names").anomalies
    } >= {key}


def test_a_damaged_root_page_and_a_leftover_are_named() -> None:
    made = built(60)
    root = made.state.root.key
    content = bytearray(made.store.get(root, 1 << 30))
    content[-1] ^= 1
    made.store.delete([root])
    made.store.put_if_absent(root, [bytes(content)])
    made.store.put_if_absent("sets/00/9-1-99.sso", [b"x"])
    report = verify_archive(made.store, depth="names")
    assert [(anomaly.kind, anomaly.key) for anomaly in report.anomalies] == [(AnomalyKind.ROOT, root)]
    assert "sets/00/9-1-99.sso" in report.leftovers


class Interrupted(FaultStore):
    """Fails after ``left`` listed objects and commits read."""

    left = 0

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        for info in super().list(prefix, start_after=start_after, limit=limit):
            if limit is None:
                self._count()
            yield info

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        if key.startswith("catalog/") and self.left < 1000:
            self._count()
        return super().get(key, max_bytes)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise UnavailableError("interrupted")


def progress_in(path: Path, url: str) -> VerifyProgress:
    return VerifyProgress(url, path.read_bytes() if path.exists() else None, path.write_bytes)


def test_an_interrupted_pass_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_progress, "SAVE_EVERY_S", 0.0)
    made = built(60)
    made.store.delete([made.keys[3], catalog_key(20)])
    made.store.put_if_absent("data/unnamed", [b"x"])
    whole = verify_archive(made.store, depth="names")
    store = Interrupted(made.store, (), wait=lambda seconds: None)
    attempts = 0
    while True:
        attempts += 1
        store.left = 90
        try:
            report = verify_archive(store, saved=progress_in(tmp_path / "progress", store.url), depth="names")
            break
        except UnavailableError:
            made.commit([Sent(ONE)])  # the pass stays at its version
    assert attempts > 2
    assert sorted(map(str, report.anomalies)) == sorted(map(str, whole.anomalies)) != []
    assert "data/unnamed" in report.leftovers
    assert report.counts == whole.counts
    # Not clean: the next pass follows the chain from where it would have.
    assert progress_in(tmp_path / "progress", store.url).verified == (0, "")


def test_the_chain_is_followed_from_the_last_clean_pass(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    made = built(20)

    def verified() -> list[str]:
        report = verify_archive(made.store, saved=progress_in(path, made.store.url), depth="names")
        return [f"{anomaly.kind} {anomaly.key}" for anomaly in report.anomalies]

    assert verified() == []
    first = progress_in(path, made.store.url).verified
    assert first == (made.writer.state.version, made.writer.state.put_id)
    for _ in range(40):
        made.commit([Sent(ONE)])
    # Versions are numbered without a hole, but one of them was replaced.
    replaced = catalog_key(first[0] + 2)
    made.store.delete([replaced])
    made.store.put_if_absent(replaced, [made.store.get(catalog_key(first[0] + 3), GET_BYTES_MAX)])
    assert f"chain {replaced}" in verified()
    assert progress_in(path, made.store.url).verified == first
    with pytest.raises(UsageError, match="this progress file of tiered verify belongs to"):
        progress_in(path, "memory://other")
    path.write_text("[]")
    with pytest.raises(UsageError, match="not a progress file"):
        progress_in(path, made.store.url)


def test_an_old_pass_is_repeated() -> None:
    now_ms = 0
    progress = VerifyProgress("u", clock=Clock(wall_ms=lambda: now_ms))
    assert progress.begin(5).version == 5
    assert progress.begin(9).version == 5
    now_ms = verify_progress.AGE_MS_MAX + 1
    assert progress.begin(9).version == 9
