"""Timers of a broker's store, an archive of them, and a broker that takes what is handed over, on one virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rocketmq_tiered.sending.timer_delivery import Place, TimerDelivery
from rocketmq_tiered.sending.timer_messages import TimerMessages
from rocketmq_tiered.sending.timer_send import Judge, TimerSend, everyone
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.uploader.timer_broker import TimerBroker as StoreOfBroker
from tiered.archive.task import run_pass
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings, TimerSettings

HOUR = 3_600_000
NOW = 1_700_000_000_000


class Target:
    """The broker. ``fault``: the n-th message -> how sending it fails."""

    def __init__(self, scene: Scene, max_delay_ms: int) -> None:
        self.scene, self.max_delay_ms = scene, max_delay_ms
        self.stored: list[tuple[str, str, int, int]] = []
        """(topic, key, when it was sent, when it was to be delivered)."""
        self._known: set[tuple[str, str]] = set()
        """Topic and place."""
        self.is_away = False
        self.fault: Callable[[int], str] = lambda _number: ""
        self.refusal: Callable[[TimerSend], str] = lambda send: send.refusal
        self.queries = self.refusals = 0
        self.sent: list[tuple[str, str, str]] = []
        """(place of the timer, topic, body)."""
        self.properties: dict[str, Mapping[str, str]] = {}

    def _answer(self) -> None:
        if self.is_away:
            raise UnavailableError("the broker is away")

    def longest_ms(self) -> int:
        self._answer()
        return self.max_delay_ms

    def is_settled(self) -> bool:
        self._answer()
        return True

    def has(self, send: TimerSend) -> bool:
        self._answer()
        self.queries += 1
        return (send.message.topic, send.place) in self._known

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        refused = {}
        for number, send in enumerate(sends):
            self._answer()
            if why := self.refusal(send):
                refused[number] = why
                self.refusals += 1
                continue
            fault = self.fault(len(self.stored) + 1)
            if fault == "before":
                raise UnavailableError("no answer")
            self.stored.append((send.message.topic, send.key, self.scene.now_ms, send.deliver_ms))
            self._known.add((send.message.topic, send.place))
            self.properties[send.key] = send.message.properties
            self.sent.append((send.place.rsplit(":", 2)[0], send.message.topic, send.message.body.decode()))
            if fault == "after":
                raise UnavailableError("no answer")
            if fault == "crash":
                raise KeyboardInterrupt
            sent(send)
        return refused

    @property
    def counts(self) -> Counter[str]:
        return Counter(key for _, key, _, _ in self.stored)


class Scene:
    """``archive``: what the store has; ``task``: the delivery of a process. ``skew_ms``: of the host's clock."""

    def __init__(
        self, path: Path, *, max_delay_ms: int = 72 * HOUR, ahead_ms: int = HOUR, url: str = ""
    ) -> None:
        self.path, self.now_ms, self.skew_ms = path, NOW, 0
        self.broker = StoreOfBroker(path / "store")
        self.url = url or f"file://{path / 'archive'}"
        self.root: ObjectStore = open_store(self.url)
        self.target = Target(self, max_delay_ms)
        self.settings = TimerSettings(ahead_ms=ahead_ms)
        self.judge: Judge = everyone
        self.task: TimerDelivery
        self._messages: TimerMessages | None = None

    def archive(self) -> None:
        """All messages."""
        backfill(self.broker.path, self.root)

    @property
    def store(self) -> PrefixedStore:
        """The archive."""
        return PrefixedStore(self.root, archive_prefix(CLUSTER, BROKER))

    def start(self, store: ObjectStore | None = None) -> None:
        """A new process, which commits to ``store``."""
        self.close()
        self._messages, store = TimerMessages(self._access), store or self.store
        self.commits = MaintenanceCommit.opened(
            store, load(store), "timers", Clock(wall_ms=lambda: self.now_ms)
        )
        self.task = TimerDelivery(
            self.commits,
            self.settings,
            self.target,
            self._read,
            self.judge,
            clock=Clock(wall_ms=lambda: self.now_ms + self.skew_ms, monotonic_s=lambda: self.now_ms / 1000),
        )

    def _access(self):  # type: ignore[no-untyped-def]
        from fetcher.access import open_access

        return open_access(self.url, cluster=CLUSTER, broker=BROKER, settings=Settings())

    def _read(self, places: Sequence[Place]):  # type: ignore[no-untyped-def]
        assert self._messages is not None
        return self._messages.read(places)

    def close(self) -> None:
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def run(self, until_ms: int, step_ms: int = 1000) -> None:
        """Passes until the clock is there; a broker that is away is tried again."""
        while self.now_ms < until_ms:
            self.now_ms = min(self.now_ms + step_ms, until_ms)
            self.one_pass()

    def one_pass(self) -> None:
        try:
            run_pass(self.task, self.commits.refresh)
        except UnavailableError:
            self.now_ms += 2000

    @property
    def state(self) -> CatalogState:
        return load(self.store)

    def check(self) -> None:
        """The archive is whole."""
        report = verify_archive(self.store, depth="full")
        assert not report.anomalies, report.anomalies
