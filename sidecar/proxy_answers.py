"""What the proxy answers from archive and broker together: the handlers and what they read, wired.

Owns opening and closing the broker's files for them and waking pulls that wait for commits. Does not own the answers.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from fetcher.access import ArchiveAccess
from fetcher.policy.hot_reader import HotReader
from fetcher.policy.read_router import PolicyLine, ReadCounters
from server.backend.pull_handlers import PullLimits
from server.backend.served_archive import ServedArchive
from server.groups.client_table import ClientTable
from server.proxy.broker_view import BrokerViews
from server.proxy.group_resets import GroupResets
from server.proxy.merged_lookups import MergedLookups
from server.proxy.merged_offsets import MergedOffsets
from server.proxy.proxy_handlers import ProxyHandlers
from server.proxy.proxy_pull import ProxyPulls
from server.proxy.pull_sources import PullContext, PullCounters
from sidecar.broker_side import open_store_of, topic_filter_of
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.store import BrokerStore
from tiered.model.queue import TopicFilter
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)

WATCH_S = 10.0
"""How often the catalog is read on where nobody in this process commits; pulls read it on themselves."""


class MergedAnswers:
    """See ``opened``. Belongs to one event loop; ``apply`` and ``close`` too."""

    def __init__(self, archive: ServedArchive, access: ArchiveAccess, settings: Settings, clients: ClientTable,
                 store: BrokerStore, *, checks_clients: bool) -> None:  # fmt: skip
        read, serve = settings.read, settings.serve
        self._archive, self._access, self._store = archive, access, store
        self._threads = ThreadPoolExecutor(read.local_threads, thread_name_prefix="broker-files")
        self.line = PolicyLine(access.catalog, read, self._topics(settings))
        self.views = views = BrokerViews(
            HotReader(store, refresh_s=read.local_refresh_ms / 1000), self._threads
        )
        context = PullContext(archive, views, clients, checks_clients)
        limits = PullLimits(
            count_max=serve.pull_messages_max,
            bytes_max=serve.pull_bytes_max,
            hold_s_max=serve.hold_ms_max / 1000,
        )
        self.reads: ReadCounters = self.line.counters
        self.pulls: PullCounters = context.counters
        offsets = MergedOffsets(self.line, archive, views)
        self.handlers: ProxyHandlers = {
            **ProxyPulls(self.line, context, limits).handlers(),
            **offsets.handlers(),
            **GroupResets(self.line, offsets, clients, checks_clients=checks_clients).handlers(),
            **MergedLookups(self.line, archive, checks_clients=checks_clients).handlers(),
        }
        self._watching = asyncio.create_task(archive.watch(WATCH_S))

    @classmethod
    async def opened(
        cls, access: ArchiveAccess, clients: ClientTable, settings: Settings, conf: BrokerConf | None
    ) -> MergedAnswers:
        """Over the archive and the broker's files. Raises what opening the store and reading the archive raise."""
        archive = ServedArchive(access)
        await archive.load()
        store = await asyncio.to_thread(open_store_of, settings, conf)
        return cls(archive, access, settings, clients, store, checks_clients=checks_clients(conf))

    def committed(self) -> None:
        """The catalog has a new version: who waits for messages looks again."""
        self._archive.wake()

    def apply(self, settings: Settings) -> None:
        """Other read policies, and what is archived, from the next pull on."""
        self.line.apply(settings.read, self._topics(settings))

    def _topics(self, settings: Settings) -> TopicFilter:
        access = self._access
        return topic_filter_of(settings, self._store.conf, access.cluster, access.broker)

    def close(self) -> None:
        """Release the broker's files."""
        self._watching.cancel()
        self._threads.shutdown()
        self._store.close()


def checks_clients(conf: BrokerConf | None) -> bool:
    """Whether the broker may refuse clients by who they are; nobody says that it does not where there is no file."""
    if conf is None:
        return True
    names = ("aclEnable", "authenticationEnabled", "authorizationEnabled")
    return any(conf.properties.get(name, "").strip().lower() == "true" for name in names)
