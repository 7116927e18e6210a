"""A broker with 400 messages, 300 of them archived, and the proxy's handlers between it and a client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fetcher.access import open_access
from fetcher.policy.broker_files import BrokerFiles
from fetcher.policy.read_policy import ReadPolicies, ReadPolicy
from fetcher.policy.read_router import ReadRouter
from rocketmq_tiered.server.backend.pull_handlers import COMMIT_OFFSET, SUBSCRIPTION, SUSPEND, PullLimits
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.groups.client_table import Subscription
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.merged_lookups import MergedLookups, MergedOffsets
from rocketmq_tiered.server.proxy.proxy_pull import ProxyPulls, PullContext
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from rocketmq_tiered.server.wire.request import Response
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, backfill
from tests.fetcher.broker_store_writer import FILE_BYTES, WrittenStore
from tests.server.proxy.scripted_broker import ScriptedBroker, phys_of
from tests.server.serving_peer import request
from tiered.broker_store.store import open_broker_store
from tiered.object_store.file import FileStore
from tiered.remoting.command import RequestCode
from tiered.settings.sections import Settings

ARCHIVED, STORED = 300, 400
BODY = b"x" * 900


@dataclass
class Subscriptions:
    """What the group wants; None: its heartbeat has not come."""

    known: Subscription | None = field(default_factory=lambda: Subscription("t", "*"))

    def subscription(self, group: str, topic: str, connection_id: int) -> Subscription | None:
        """See pull.Subscriptions."""
        return self.known


@dataclass
class Scene:
    """``at``: the monotonic time of the caches; moved by hand."""

    store: WrittenStore
    root: FileStore
    broker: ScriptedBroker
    archive: ServedArchive
    router: ReadRouter
    views: BrokerViews
    pulls: ProxyPulls
    context: PullContext
    offsets: MergedOffsets
    lookups: MergedLookups
    upstream: RemotingUpstream
    subscriptions: Subscriptions
    hot: BrokerFiles | None
    is_away: bool = False

    async def pull(
        self,
        offset: int,
        *,
        flags: int = SUSPEND,
        hold_ms: int = 50,
        count: int = 32,
        topic: str = "t",
        code: int = RequestCode.PULL_MESSAGE,
        **fields: object,
    ) -> Response:
        """One pull."""
        ext = {
            "topic": topic,
            "queueId": 0,
            "queueOffset": offset,
            "consumerGroup": "g",
            "maxMsgNums": count,
            "sysFlag": flags,
            "suspendTimeoutMillis": hold_ms,
            "commitOffset": 0,
            "subVersion": 0,
        } | fields
        if flags & SUBSCRIPTION:
            ext.setdefault("subscription", "*")
        return await self.pulls.pull(request(code, **ext), self.upstream)

    async def ask(self, code: int, body: Any = None, **fields: object) -> Response:
        """Any other request."""
        handler = {**self.offsets.handlers(), **self.lookups.handlers()}[code]
        found = await handler(request(code, body=body, **fields), self.upstream)
        assert found is not None
        return found

    def numbers(self, response: Response, topic: str = "t") -> list[int]:
        """Queue offsets in the body; every record is compared with what was stored."""
        data = b"".join(bytes(piece) for piece in response.body)
        found = []
        while data:
            size = int.from_bytes(data[:4], "big")
            number = int.from_bytes(data[20:28], "big")
            assert data[:size] == self.store.records[topic, 0][number]
            found.append(number)
            data = data[size:]
        return found

    def policy(self, name: str) -> None:
        """Another policy for all topics."""
        self.router.apply(ReadPolicies(ReadPolicy(name)))

    def expire(self, offset: int, *, quietly: bool = False, topic: str = "t") -> int:
        """The broker deletes the files below the record of ``topic`` at ``offset``; its new minimum there.
        ``quietly``: its consume queues do not know yet."""
        first = phys_of(self.store.records[topic, 0][offset]) // FILE_BYTES * FILE_BYTES
        minimums = self.broker.lost if quietly else self.broker.minimum
        for place, records in self.store.records.items():
            kept = [number for number, record in records.items() if phys_of(record) >= first]
            minimums[place] = min(kept, default=max(records) + 1)
        for path in (self.store.path / "commitlog").iterdir():
            if int(path.name) < first:
                path.unlink()
        return minimums[topic, 0]

    def forget(self) -> None:
        """A second has gone by."""
        self.views._known.evict(1 << 40)
        self.views._oldest = None
        if self.hot is not None:
            self.hot.expire()

    async def commit_archive(self, store: Path) -> None:
        """The uploader gets on."""
        await asyncio.to_thread(backfill, store, self.root)
        self.archive._catalog._refreshed_s = -1e9
        self.archive._catalog.refresh_if_due()
        await asyncio.sleep(0.1)

    def break_archive(self, error: Exception) -> None:
        """Every read of the archive fails."""

        async def fail(*arguments: Any, **others: Any) -> Any:
            raise error

        for name in ("pull", "offset_by_time", "stored_ms", "message_at_phys", "messages_by_key"):
            setattr(self.archive, name, fail)


@asynccontextmanager
async def beside_a_broker(
    tmp_path: Path, *, with_files: bool = True, tags: bool = False, policy: str = "NOT_IN_DISK"
) -> AsyncIterator[Scene]:
    """``with_files``: whether the broker's files can be read here; else requests are sent to it."""
    store = WrittenStore(tmp_path / "store")
    root = FileStore(tmp_path / "archive")

    def put(numbers: range) -> None:
        for number in numbers:
            # Three messages a millisecond, so that a file's first message may have older ones of its time.
            tag = "ab"[number % 2] if tags else ""
            store.put("t", 0, BODY + b" %d" % number, tags=tag, later_ms=number // 3)

    put(range(ARCHIVED))
    backfill(store.path, root)
    put(range(ARCHIVED, STORED))
    broker = ScriptedBroker(store)
    await broker.start()
    access = open_access(
        f"file://{tmp_path / 'archive'}", cluster=CLUSTER, broker=BROKER, settings=Settings()
    )
    archive = ServedArchive(access)
    await archive.load()
    hot = BrokerFiles(open_broker_store(store.path)) if with_files else None
    router = ReadRouter(access.catalog, ReadPolicies(ReadPolicy(policy)), FILTER)
    views, subscriptions = BrokerViews(hot), Subscriptions()
    context = PullContext(archive, views, subscriptions)
    upstream = RemotingUpstream(broker.address, InflightLimit())
    scene = Scene(
        store,
        root,
        broker,
        archive,
        router,
        views,
        ProxyPulls(router, context, PullLimits(hold_s_max=1.5)),
        context,
        MergedOffsets(router, archive, views),
        MergedLookups(router, archive),
        upstream,
        subscriptions,
        hot,
    )
    try:
        yield scene
    finally:
        upstream.close()
        await broker.kill()
        if hot is not None:
            hot.close()
        access.close()


__all__ = [
    "ARCHIVED",
    "COMMIT_OFFSET",
    "STORED",
    "SUBSCRIPTION",
    "SUSPEND",
    "Scene",
    "beside_a_broker",
]
