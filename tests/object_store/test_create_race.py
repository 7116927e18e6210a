"""The race of creates: passes on real stores, and finds stores that let several writers succeed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.object_store.imperfect_stores import OverwritingStore, RacyStore, UndeletableStore
from tiered.errors import RefusedRequestError, ThrottledError
from tiered.object_store.create_race import race_creates, require_exclusive_creates
from tiered.object_store.file import FileStore
from tiered.object_store.interface import Body, ObjectStore
from tiered.object_store.memory import MemoryStore


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), lambda path: FileStore(path / "a")])
def test_it_passes_and_leaves_nothing(make: Callable[[Path], ObjectStore], tmp_path: Path) -> None:
    store = make(tmp_path)
    require_exclusive_creates(store)
    assert list(store.list("")) == []


def test_a_store_that_lets_several_creates_win_is_refused() -> None:
    store = RacyStore()
    with pytest.raises(RefusedRequestError, match="of 16 concurrent creates of one key succeeded"):
        require_exclusive_creates(store)
    assert list(store.list("")) == []


def test_a_store_that_replaces_objects_is_refused() -> None:
    with pytest.raises(RefusedRequestError, match="concurrent creates"):
        race_creates(OverwritingStore(), "key")
    with pytest.raises(RefusedRequestError, match="a second create replaced the object"):
        race_creates(OverwritingStore(), "key", racers=1)


def test_a_store_that_refuses_all_is_temporarily_unavailable() -> None:
    class Busy(MemoryStore):
        def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
            raise ThrottledError("busy")

    with pytest.raises(ThrottledError):
        require_exclusive_creates(Busy())


def test_objects_that_cannot_be_removed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require_exclusive_creates(UndeletableStore(), rounds=1)
    assert "1 objects below doctor/" in caplog.text and "s3:DeleteObject" in caplog.text
