"""The façade inside `tiered run`: a thread with an event loop, an archive opened for reading, and their end.

The relay works from the first moment; what needs the archive begins when there is one to open, which the uploader
makes. Commits of the uploader in this process are taken over as they happen.

Owns the thread and the archive's access. Does not own what is served (fetcher/serving/facade).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from fetcher.access import ArchiveAccess, open_async_access
from fetcher.serving.facade.protocol import FacadeHandlers
from fetcher.serving.facade.service import FacadeCounters, FacadePlace, FacadeService, FacadeStatus
from tiered.broker_store.names import BrokerNames
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, TieredError, UnavailableError, UsageError
from tiered.settings.sections import ReadSettings, Settings

logger = logging.getLogger(__name__)

START_S = 30.0
OPEN_AGAIN_S = 1.0
OPEN_AGAIN_MAX_S = 10.0


class Answers(Protocol):
    """What answers from archive and broker together, once the archive is open."""

    @property
    def handlers(self) -> FacadeHandlers:
        """Who answers which code."""
        ...

    def apply(self, settings: ReadSettings) -> None:
        """Other read policies from the next request on."""
        ...

    def committed(self) -> None:
        """The catalog has a new version."""
        ...

    def close(self) -> None:
        """Release what was opened, but for the access."""
        ...


@dataclass(frozen=True)
class FacadeOrder:
    """What to serve. ``answers``: made on the event loop when the archive is open."""

    place: FacadePlace
    names: BrokerNames
    answers: Callable[[ArchiveAccess, FacadeService], Awaitable[Answers]]


class FacadeThread:
    """Serves from ``start`` to ``close``. Methods are callable from any thread."""

    def __init__(self, order: FacadeOrder, settings: Settings) -> None:
        self._order, self._settings = order, settings
        self._service = FacadeService(order.place, settings.serve, settings.read)
        self._started: Future[tuple[str, int]] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="facade", daemon=True)
        self._access: ArchiveAccess | None = None
        self._answers: Answers | None = None
        self._newest: CatalogState | None = None
        self._drain_s = 0.0

    def start(self) -> tuple[str, int]:
        """Listen; the address bound. Raises UsageError when that is not possible."""
        self._thread.start()
        return self._started.result(START_S)

    @property
    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    @property
    def counters(self) -> FacadeCounters:
        """See FacadeService."""
        return self._service.counters

    def status(self) -> FacadeStatus:
        """See FacadeService."""
        return self._service.status()

    def adopt(self, state: CatalogState) -> None:
        """The uploader has committed ``state``."""
        self._newest = state
        if self._access is not None:
            self._access.catalog.adopt(state)
        if self._answers is not None:
            self._on_loop(self._answers.committed)

    def apply(self, settings: Settings) -> None:
        """Put the read policies of ``settings`` in force."""
        self._on_loop(lambda: self._apply(settings))

    def _apply(self, settings: Settings) -> None:
        self._settings = settings
        self._service.apply(settings.read)
        if self._answers is not None:
            self._answers.apply(settings.read)

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
            logger.critical("the façade has ended", exc_info=error)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        bind = self._settings.serve.bind
        try:
            address = await self._service.start()
        except OSError as error:
            raise UsageError(f"cannot listen on {bind}: {error}", hint="set serve.bind") from error
        self._started.set_result(address)
        async with AsyncExitStack() as opened:
            opening = asyncio.create_task(self._open(opened))
            await self._stop.wait()
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await self._service.close(self._drain_s)

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
        access = await asyncio.to_thread(self._access_now)
        try:
            answers = await self._order.answers(access, self._service)
        except BaseException:
            await asyncio.to_thread(access.close)
            raise
        opened.push_async_callback(asyncio.to_thread, access.close)
        opened.callback(answers.close)
        self._access = access
        if self._newest is not None:
            access.catalog.adopt(self._newest)
        answers.apply(self._settings.read)
        self._answers = answers
        self._service.open_archive(answers.handlers)
        logger.info(
            "clients read the archive", extra={"archive": access.title, "version": access.state.version}
        )

    def _access_now(self) -> ArchiveAccess:
        names, settings = self._order.names, self._settings
        return open_async_access(
            settings.archive.url, cluster=names.cluster, broker=names.broker, settings=settings
        )
