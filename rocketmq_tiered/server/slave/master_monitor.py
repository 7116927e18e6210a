"""Monitors the master: whether it answers, its configuration, and whether that allows slave mode.

Reads the configuration periodically over a connection of its own; a lost connection is noticed at once. If access rules
forbid that, the configuration file beside the sidecar counts. Sends reads only.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from rocketmq_tiered.server.proxy.upstream import InflightLimit, LinkEvents, RemotingUpstream
from rocketmq_tiered.server.slave.registration import SlaveConfig, master_refusal
from tiered.errors import UnavailableError
from tiered.remoting.command import VERSION, RemotingCommand, RequestCode, ResponseCode
from tiered.remoting.credentials import Credentials

logger = logging.getLogger(__name__)

READ_EVERY_S = 10.0
RETRY_S = 1.0
ANSWER_S = 3.0


class MasterMonitor:
    """Belongs to one event loop. ``broker_conf``: the properties of its configuration file, None without one.
    ``credentials`` sign the requests."""

    def __init__(
        self,
        slave: SlaveConfig,
        broker_conf: Mapping[str, str] | None,
        credentials: Credentials | None = None,
    ) -> None:
        """``slave``: how this process is registered, with the master's address. Nothing is requested before ``start``;
        until the first reply slave mode is refused."""
        self._broker, self._broker_conf = slave.broker, broker_conf
        fields = {} if credentials is None else credentials.signed({})
        self._request = RemotingCommand(RequestCode.GET_BROKER_CONFIG, 0, ext_fields=fields)
        events = LinkEvents(on_lost=self._lost)
        self._link = RemotingUpstream(slave.broker_address, InflightLimit(), events, slave.tls)
        self._task: asyncio.Task[None] | None = None
        self._first_answer = asyncio.Event()
        self._wake = asyncio.Event()
        # Why slave mode is ruled out: by the master's configuration, perhaps as a peer's request suggests, and until
        # the next start of this process, if the configuration could not be read after such a request.
        self._refusal: str | None = "the master has not answered yet"
        self._suspicion: str | None = None
        self._expelled: str | None = None
        self.config: Mapping[str, str] = {}
        """The master's configuration as last read; empty if it refuses to show it."""
        self.version = VERSION
        """The version in its replies; also sent to consumers."""
        self.answers = 0
        """Number of replies."""
        self._has_answered: bool | None = None
        """None before the first request, so that its outcome is logged too."""
        self.failure = ""
        """Why it does not answer, if known; empty while it answers."""
        self.on_refusal: Callable[[], None] = lambda: None
        """Called when ``refusal`` gives another reason than before."""

    @property
    def is_available(self) -> bool:
        """Whether it answered the last request, over a connection that is still open. Callable from any thread.

        A master that vanishes silently (power loss, stopped process) counts as available until a request times out:
        READ_EVERY_S + ANSWER_S at most. That loses nothing: a consumer is redirected to the master only after a read of
        its queue there (pull_redirect.next_id), relayed requests get no reply and are repeated, and a replacement is
        not mistaken for this master (SlaveRegistrar).
        """
        return self._has_answered is True and self._link.is_connected

    def start(self) -> None:
        """Read the configuration periodically from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._has_answered = False  # no warning about the end
        self._link.close("the service stops")

    async def answered(self) -> None:
        """Wait for the first reply."""
        await self._first_answer.wait()

    def refusal(self) -> str | None:
        """Why slave mode is ruled out, or None. The last state holds while the master is away."""
        return self._expelled or self._refusal

    def suspect(self, why: str) -> None:
        """A peer, perhaps the master, treats this process as a replica. The master's configuration decides; if it is
        not readable, slave mode ends until the next start."""
        self._suspicion = why
        self._wake.set()

    def redirects(self) -> bool | None:
        """Whether it redirects slow consumers at all (slaveReadEnable); None: unknown."""
        value = self.config.get("slaveReadEnable")
        return None if value is None else value.strip().lower() == "true"

    async def _run(self) -> None:
        """Read the master's configuration every READ_EVERY_S, soon after ``suspect``, and every RETRY_S while the
        master is away; until cancelled."""
        while True:
            try:
                await self._read()
            except Exception as error:
                # Unexpected: stale state may send no consumer back.
                logger.exception(
                    "the master's configuration could not be read because of an unexpected error, and the next attempt"
                    " follows"
                )
                self._enter(False, repr(error))
            self._wake.clear()
            if not self.is_available:
                await asyncio.sleep(RETRY_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_EVERY_S):
                    await self._wake.wait()
                if self.is_available:
                    # ``suspect`` does not cause a read each time.
                    await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        """Read the master's configuration once, and note whether it allows slave mode. If the master does not show it,
        the broker's configuration file beside this process counts. A new reason against slave mode is announced."""
        try:
            answer = await self._link.call(self._request, ANSWER_S)
        except UnavailableError as error:
            self._enter(False, str(error))
            return
        self._enter(True, "")
        self.answers += 1
        self.version = answer.version
        before, suspicion = self.refusal(), self._suspicion
        self._suspicion = None
        if answer.code == ResponseCode.SUCCESS:
            self.config = _properties(answer.body)
            self._refusal = master_refusal(self.config, self._broker)
        else:
            if suspicion is not None and self._expelled is None:
                logger.error("slave mode ends until the next start of this process: %s", suspicion)
                self._expelled = suspicion
            if self._broker_conf is not None:
                self._refusal = master_refusal(self._broker_conf, self._broker)
            else:
                self._refusal = (
                    "the master refuses to show its configuration: set broker.conf_path to its file, "
                    "or broker.credentials_file to an account"
                )
        self._first_answer.set()
        if self.refusal() not in (None, before):
            self.on_refusal()

    def _lost(self, why: str, had_requests: bool) -> None:
        self._enter(False, why)
        self._wake.set()

    def _enter(self, has_answered: bool, why: str) -> None:
        """Note whether the master answers, and log it if that has changed."""
        if has_answered != self._has_answered:
            logger.log(
                logging.INFO if has_answered else logging.WARNING,
                "the master %s",
                "answers" if has_answered else "does not answer",
                extra={"why": why},
            )
        self._has_answered, self.failure = has_answered, why


def _properties(body: bytes) -> dict[str, str]:
    lines = (line.partition("=") for line in body.decode("utf-8", "replace").splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in lines}
