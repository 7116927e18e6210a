"""What `tiered run` serves: a thread with an event loop, ports on it, one archive opened for reading, and their end.

Ports are open from the first moment; what needs the archive begins when there is one to open, which the uploader
makes. Commits of the uploader in this process are taken over as they happen. All ports share one archive access: its
caches, lanes and byte budget are the process's.

Owns the thread and the access. Does not own what is served (server/proxy, server/slave).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from fetcher.access import ArchiveAccess, open_async_access
from server.proxy.proxy_handlers import ProxyHandlers
from tiered.broker_store.names import BrokerNames
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, TieredError, UnavailableError, UsageError
from tiered.settings.load import FIELDS, changed_keys
from tiered.settings.sections import ReadSettings, Settings

logger = logging.getLogger(__name__)

START_S = 30.0
OPEN_AGAIN_S = 1.0
OPEN_AGAIN_MAX_S = 10.0
PORTS_MADE_WITH = ("read", "serve", "broker.address", "broker.conf_path")
"""Sections and keys that what serves clients takes its values from when the process starts."""
OPENED_WITH = ("object_store", "fetch", "prefetch")
"""Sections that it takes its values from when the archive is opened."""


class Answers(Protocol):
    """What answers from archive and broker together, once the archive is open."""

    @property
    def handlers(self) -> ProxyHandlers:
        """Who answers which code."""
        ...

    def apply(self, settings: Settings) -> None:
        """Other read policies, and what is archived, from the next request on."""
        ...

    def committed(self) -> None:
        """The catalog has a new version."""
        ...

    def close(self) -> None:
        """Release what was opened, but for the access."""
        ...


class PortService(Protocol):
    """What listens on one port, on the thread's event loop."""

    async def start(self) -> tuple[str, int]:
        """Listen; the address bound. Raises OSError when the port is taken, UsageError for bad settings."""
        ...

    def open_archive(self, handlers: ProxyHandlers) -> None:
        """From now on these answer their codes."""
        ...

    def apply(self, policies: ReadSettings) -> None:
        """Other read policies."""
        ...

    async def close(self, drain_s: float) -> None:
        """Let requests at work end for ``drain_s``, hang up."""
        ...


@dataclass(frozen=True)
class Port:
    """One service. ``bind`` and ``setting``: for its refusals. ``answers``: made on the event loop when the archive is
    open."""

    service: PortService
    bind: str
    setting: str
    answers: Callable[[ArchiveAccess], Awaitable[Answers]]


class ServingThread:
    """Serves from ``start`` to ``close``. Methods are callable from any thread."""

    def __init__(self, names: BrokerNames, settings: Settings, ports: Sequence[Port]) -> None:
        self._names, self._settings, self._ports = names, settings, ports
        self._made_with = settings
        self._started: Future[list[tuple[str, int]]] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._access: ArchiveAccess | None = None
        self._opened_with: Settings | None = None
        self._answers: list[Answers] = []
        self._newest: CatalogState | None = None
        self._drain_s = 0.0

    def start(self) -> list[tuple[str, int]]:
        """Listen; the addresses bound, in the order of ports. Raises UsageError when that is not possible."""
        self._thread.start()
        return self._started.result(START_S)

    @property
    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def adopt(self, state: CatalogState) -> None:
        """The uploader has committed ``state``."""
        self._newest = state
        if self._access is not None:
            self._access.catalog.adopt(state)
        for answers in self._answers:
            self._on_loop(answers.committed)

    def apply(self, settings: Settings) -> None:
        """Put the read policies of ``settings`` in force, and what is archived; tell of what stays as it was for
        clients."""
        self._on_loop(lambda: self._apply(settings))

    def _apply(self, settings: Settings) -> None:
        self._settings = settings
        stays = _what_stays(self._made_with, settings, PORTS_MADE_WITH)
        if self._opened_with is not None:
            stays += _what_stays(self._opened_with, settings, OPENED_WITH)
        if stays:
            logger.warning(
                "clients are served by the values of before until a restart", extra={"keys": stays}
            )
        for port in self._ports:
            port.service.apply(settings.read)
        for answers in self._answers:
            answers.apply(settings)

    def close(self, drain_s: float = 5.0) -> None:
        """Let requests at work end for ``drain_s``, hang up, close the archive."""
        self._drain_s = drain_s
        if self._stop is not None:
            self._on_loop(self._stop.set)
        self._thread.join(drain_s + START_S)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call)

    # -- on its own thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            logger.critical("clients are served no more", exc_info=error)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            self._started.set_result([await _listening(port) for port in self._ports])
        except BaseException:
            await self._close()
            raise
        async with AsyncExitStack() as opened:
            opening = asyncio.create_task(self._open(opened))
            await self._stop.wait()
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*(port.service.close(self._drain_s) for port in self._ports))

    async def _open(self, opened: AsyncExitStack) -> None:
        """Open the archive, however long that takes."""
        wait_s, told = OPEN_AGAIN_S, ""
        while True:
            try:
                await self._open_once(opened)
                return
            except NotFoundError:
                wait_s = OPEN_AGAIN_S  # the uploader's first commit makes it
            except TieredError as error:
                level = logging.WARNING if isinstance(error, UnavailableError) else logging.ERROR
                if str(error) != told:
                    logger.log(level, "the archive cannot be opened for clients yet: %s", error)
                told = str(error)
                wait_s = min(OPEN_AGAIN_MAX_S, wait_s * 2)
            await asyncio.sleep(wait_s)

    async def _open_once(self, opened: AsyncExitStack) -> None:
        opened_with = self._settings
        access = await asyncio.to_thread(self._access_now)
        made: list[Answers] = []
        try:
            for port in self._ports:
                made.append(await port.answers(access))
        except BaseException:
            for answers in made:
                answers.close()
            await asyncio.to_thread(access.close)
            raise
        opened.push_async_callback(asyncio.to_thread, access.close)
        for answers in made:
            opened.callback(answers.close)
        self._access, self._opened_with = access, opened_with
        if self._newest is not None:
            access.catalog.adopt(self._newest)
        for port, answers in zip(self._ports, made, strict=True):
            answers.apply(self._settings)
            port.service.open_archive(answers.handlers)
        self._answers = made
        logger.info(
            "clients read the archive", extra={"archive": access.title, "version": access.state.version}
        )

    def _access_now(self) -> ArchiveAccess:
        names, settings = self._names, self._settings
        return open_async_access(
            settings.archive.url, cluster=names.cluster, broker=names.broker, settings=settings
        )


def _what_stays(before: Settings, after: Settings, places: Collection[str]) -> list[str]:
    """Keys of ``places`` that are in force for the uploader, and for clients not; those that need a restart are told
    already."""
    rules = ((key, FIELDS[key]) for key in changed_keys(before, after))
    return [
        key
        for key, item in rules
        if (item.section in places or key in places) and not (item.rule.live or item.rule.restart)
    ]


async def _listening(port: Port) -> tuple[str, int]:
    try:
        return await port.service.start()
    except OSError as error:
        raise UsageError(f"cannot listen on {port.bind}: {error}", hint=f"set {port.setting}") from error
