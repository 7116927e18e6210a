"""What Offloader.status says at the edges of a run and in an outage of the object store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL
from tiered.broker_store.store import open_broker_store
from tiered.errors import ThrottledError
from tiered.model.queue import TopicFilter
from tiered.object_store.memory import MemoryStore
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity


def test_a_writer_without_messages_says_that_it_owns_the_archive(real_store: Callable[[str], Path]) -> None:
    stop = threading.Event()
    with open_broker_store(real_store("F") / "store") as store:
        offloader = Offloader(
            store,
            MemoryStore("memory://no-messages"),
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SMALL,
            topic_filter=TopicFilter(include=("no such topic",), cluster=CLUSTER, broker=BROKER),
            offsets_source=no_offsets,
        )
        assert offloader.status() is None
        thread = threading.Thread(target=offloader.run, args=(stop,), kwargs={"follow": True})
        thread.start()
        deadline_s = time.monotonic() + 60
        while (status := offloader.status()) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        stop.set()
        thread.join()
    assert status is not None
    assert status.epoch == 1, "the epoch is claimed before anything is followed"


class _Refusing(MemoryStore):
    """Refuses data objects while ``is_down``."""

    is_down = False

    def put_if_absent(self, key: str, *arguments: Any, **named: Any) -> Any:
        if self.is_down and "/data/" in f"/{key}":
            raise ThrottledError("the endpoint is unreachable")
        return super().put_if_absent(key, *arguments, **named)


def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def test_an_outage_of_the_store_is_a_problem_until_it_ends(real_store: Callable[[str], Path]) -> None:
    stop = threading.Event()
    objects = _Refusing("memory://outage")
    objects.is_down = True
    with open_broker_store(real_store("F") / "store") as store:
        offloader = Offloader(
            store,
            objects,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SMALL,
            topic_filter=TopicFilter(cluster=CLUSTER, broker=BROKER),
            offsets_source=no_offsets,
        )

        def problem() -> str | None:
            status = offloader.status()
            return None if status is None else status.store_problem

        thread = threading.Thread(target=offloader.run, args=(stop,), kwargs={"follow": True})
        thread.start()
        seen = _wait_for(lambda: "unreachable" in (problem() or ""))
        objects.is_down = False
        ended = _wait_for(lambda: problem() == "")
        stop.set()
        thread.join()
    assert seen and ended
