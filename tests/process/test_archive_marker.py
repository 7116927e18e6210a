"""An archive that was begun is not begun a second time where its disk is not mounted, or its bucket is another one."""

import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.process.instance import ArchiveMarker, StateDirectory
from rocketmq_tiered.process.uploader_job import ProcessPins, UploaderJob, Writer
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.errors import CatalogLostError, NotFoundError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import Settings

pytestmark = pytest.mark.integration  # whole uploaders and processes


class Host:
    """A broker's store, a state directory, and a disk mounted at ``mount``."""

    def __init__(self, store: Path, root: Path) -> None:
        self.root, self.mount = root, root / "mount"
        self.mount.mkdir()
        self.state_dir = root / "state"
        default = Settings()
        self.settings = replace(
            default,
            broker=replace(default.broker, store_path=str(shutil.copytree(store, root / "store"))),
            offload=replace(default.offload, batch_age_ms=100),
            archive=replace(default.archive, url=(self.mount / "archive").as_uri(), cluster="c", broker="b"),
        )

    def state(self) -> CatalogState:
        """Of the archive."""
        named = self.settings.archive
        with closing(open_store(named.url, StoreOptions(self.settings.object_store))) as store:
            return load(PrefixedStore(store, archive_prefix(named.cluster, named.broker)))

    def is_begun(self) -> bool:
        """Whether the archive has messages."""
        try:
            return self.state().started
        except NotFoundError:
            return False

    def run(self, *, new_archive: bool = False) -> CatalogState:
        """A process of its own, until messages are archived; a second's wait is enough where all are."""
        wait_s = 1 if self.is_begun() else 60
        with StateDirectory(self.state_dir) as state:
            ended = threading.Event()
            writer = Writer(
                state.identity(),
                "run",
                False,
                state.path,
                committed=lambda _: ended.set(),
                pins=ProcessPins(),
                new_archive=new_archive,
            )
            timer = threading.Timer(wait_s, ended.set)
            timer.start()
            try:
                UploaderJob(self.settings, writer, StoreMetrics()).run(ended)
            finally:
                timer.cancel()
        return self.state()

    def backfill(self) -> CatalogState:
        """Of a process without a state directory."""
        writer = Writer("filler", "backfill", False)
        UploaderJob(self.settings, writer, StoreMetrics()).offload(threading.Event(), follow=False)
        return self.state()

    def unmount(self) -> None:
        self.mount.rename(self.root / "disk")
        self.mount.mkdir()

    def mount_again(self) -> None:
        shutil.rmtree(self.mount)
        (self.root / "disk").rename(self.mount)


@pytest.fixture
def host(real_store: Callable[[str], Path], tmp_path: Path) -> Host:
    return Host(real_store("F") / "store", tmp_path)


def test_no_second_archive_is_begun_below_the_mount_point_of_a_disk_that_is_away(host: Host) -> None:
    first = host.run()
    host.unmount()
    with pytest.raises(CatalogLostError, match=r"archived to it before.*mount its disk"):
        host.run()
    assert list(host.mount.iterdir()) == []
    host.mount_again()
    again = host.run()
    assert again.epoch == first.epoch + 1 and again.cursor.phys >= first.cursor.phys > 0


def test_an_emptied_bucket_is_no_archive_to_begin(
    host: Host, minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio_url.environment().items():
        monkeypatch.setenv(name, value)
    url, options = minio_url.fresh_bucket(), minio_url.options()
    settings = host.settings
    host.settings = replace(
        settings, archive=replace(settings.archive, url=url), object_store=options.settings
    )
    assert host.run().started
    with closing(open_store(url, options)) as store:
        store.delete([info.key for info in store.list("")])
        with pytest.raises(CatalogLostError, match="archived to it before"):
            host.run()
        assert list(store.list("")) == []


def test_a_new_archive_is_begun_when_that_is_wanted(host: Host) -> None:
    host.run()
    host.unmount()
    with pytest.raises(CatalogLostError, match="--new-archive"):
        host.run()
    assert host.run(new_archive=True).started


def test_a_mistyped_url_begins_no_archive(host: Host) -> None:
    host.run()
    named = host.settings.archive
    host.settings = replace(host.settings, archive=replace(named, url=f"{named.url}-mistyped"))
    with pytest.raises(UsageError, match=r"archive-mistyped/c/b is empty, and .*/archive/c/b before"):
        host.run()
    assert host.run(new_archive=True).started
    host.settings = replace(host.settings, archive=named)
    assert host.run().started


def test_an_archive_of_an_older_release_gets_a_marker_too(host: Host) -> None:
    """It was begun by a process that wrote no marker."""
    host.run()
    (marker,) = host.state_dir.glob("begun-*")
    marker.unlink()
    host.run()
    host.unmount()
    with pytest.raises(CatalogLostError, match="archived to it before"):
        host.run()


def test_another_archive_is_begun_all_the_same(host: Host) -> None:
    host.run()
    host.unmount()
    host.settings = replace(host.settings, archive=replace(host.settings.archive, broker="b2"))
    assert host.run().broker == "b2"


def test_a_backfill_without_a_state_directory_writes_no_marker(host: Host) -> None:
    assert host.backfill().started
    host.unmount()
    assert host.backfill().started


def test_a_state_directory_that_is_full_keeps_nothing_from_being_archived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").touch()
    ArchiveMarker(tmp_path / "state", "s3://bucket/c/b").create()
    assert "cannot be written, so a later start will not know" in caplog.text
