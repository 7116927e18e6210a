"""Backfill finds the ends of its queues only where a decision needs them, and judges damage only after that."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.consume_queue.file_queues import FileConsumeQueues
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import OffloadSettings
from uploader.bound_source import BoundSource, no_offsets
from uploader.offload import Environment, Offloader, OffloadIdentity

SMALL = OffloadSettings(batch_bytes=256 << 10, split_bytes=64 << 10, block_bytes=64 << 10)
Records = dict[tuple[str, int], tuple[int, int]]


@pytest.fixture
def slow_ends(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Looking at the ends of queues takes until the event is set."""
    ready = threading.Event()
    look = FileConsumeQueues.last_records

    def wait(index: FileConsumeQueues) -> Records:
        assert ready.wait(30), "nothing was committed before the ends were known"
        return look(index)

    monkeypatch.setattr(FileConsumeQueues, "last_records", wait)
    return ready


def _offloader(store: BrokerStore, environment: Environment) -> Offloader:
    identity = OffloadIdentity(CLUSTER, BROKER, "test", "backfill")
    return Offloader(
        store,
        MemoryStore(),
        identity,
        SMALL,
        topic_filter=FILTER,
        offsets_source=no_offsets,
        environment=environment,
    )


def test_messages_are_committed_before_all_queue_ends_are_known(
    real_store: Callable[[str], Path], slow_ends: threading.Event
) -> None:
    with open_broker_store(real_store("A") / "store") as store:
        environment = Environment(committed=lambda _state: slow_ends.set())
        result = _offloader(store, environment).run(threading.Event(), follow=False)
    assert slow_ends.is_set()
    assert result.commits > 2
    assert result.damaged == 0


def test_damage_is_judged_once_the_ends_are_known(
    real_store: Callable[[str], Path], tmp_path: Path, slow_ends: threading.Event
) -> None:
    """Before, an invalid record could be the end of the log as well: nothing is decided about it."""
    directory = tmp_path / "store"
    shutil.copytree(real_store("A") / "store", directory)
    log = min((directory / "commitlog").iterdir())
    with log.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\xff" * 200)
    with open_broker_store(directory) as store:
        environment = Environment(committed=lambda _state: slow_ends.set())
        result = _offloader(store, environment).run(threading.Event(), follow=False)
    assert result.damaged == 1
    assert result.to_phys > 2 << 20


@pytest.fixture
def no_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of queues cannot be looked at."""

    def fail(_index: FileConsumeQueues) -> Records:
        raise PermissionError("consumequeue")

    monkeypatch.setattr(FileConsumeQueues, "last_records", fail)


@pytest.mark.usefixtures("no_ends")
def test_before_a_queue_is_hidden_the_ends_are_looked_at(real_store: Callable[[str], Path]) -> None:
    """Units may still be missing: what follows the last one is not gone, but not yet dispatched."""
    with (
        open_broker_store(real_store("E") / "store") as store,
        pytest.raises(PermissionError),
    ):
        _offloader(store, Environment()).run(threading.Event(), follow=False)


@pytest.mark.usefixtures("no_ends")
def test_unreadable_queues_end_the_backfill(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "store"
    shutil.copytree(real_store("F") / "store", directory)
    with max((directory / "commitlog").iterdir()).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")  # something was written behind the last record: is it damage, or the end?
    with open_broker_store(directory) as store:
        with pytest.raises(PermissionError):
            BoundSource(store, no_offsets).ask(0)
        with pytest.raises(PermissionError):
            _offloader(store, Environment()).run(threading.Event(), follow=False)
