"""`tiered run --take-over`: repeated until the store answers, once for each load of the settings."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketmq_tiered.cli.run import _Factory
from rocketmq_tiered.process.instance import StateDirectory
from rocketmq_tiered.process.uploader_job import UploaderJob
from tests.catalog.drafts import writer
from tiered.errors import FencedError, ThrottledError
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.load import load_settings
from tiered.settings.sections import Settings

URL = "memory://taken-over"


@pytest.fixture
def settings(real_store: Callable[[str], Path], tmp_path: Path) -> Settings:
    shutil.copytree(real_store("F") / "store", tmp_path / "store")
    flags: dict[str, tuple[str, object]] = {
        "archive.take_over": ("flag", True),
        "archive.url": ("flag", URL),
        "archive.cluster": ("flag", "c"),
        "archive.broker": ("flag", "b"),
        "broker.store_path": ("flag", str(tmp_path / "store")),
    }
    return load_settings(flags=flags).settings


@pytest.fixture
def factory(tmp_path: Path) -> Iterator[_Factory]:
    with StateDirectory(tmp_path / "state") as state:
        factory = _Factory(state, StoreMetrics(), None)
        yield factory
        factory.close()


@pytest.fixture
def archive() -> PrefixedStore:
    """Gone with its last reference."""
    return PrefixedStore(open_store(URL), archive_prefix("c", "b"))


def another_claims(archive: PrefixedStore) -> None:
    """And ends without releasing the archive."""
    writer(archive, instance="another host").claim(take_over=True)


def run(job: UploaderJob) -> None:
    """Until it owns the archive and has nothing to do."""
    stop = threading.Event()
    stop.set()
    job.run(stop)


def test_a_store_that_was_away_gets_the_request_again_and_one_that_answered_does_not(
    settings: Settings, factory: _Factory, archive: PrefixedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_claims(archive)
    with monkeypatch.context() as away:
        away.setattr(MemoryStore, "list", refuse)
        with pytest.raises(ThrottledError):
            run(factory(settings))
    run(factory(settings))
    another_claims(archive)
    with pytest.raises(
        FencedError, match=r"another host.* on .*; this process takes over once its broker is the master"
    ):
        run(factory(settings))


def refuse(*_: object, **__: object) -> None:
    raise ThrottledError("503 SlowDown")
