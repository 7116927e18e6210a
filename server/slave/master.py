"""What is known of the master: whether it answers, how it is configured, and whether it leaves a place for us.

Its configuration is read again and again, by a connection of our own; a lost connection is noticed at once. Where it
does not tell (access rules), its configuration file beside us counts. Nothing is sent that changes anything.

Owns that knowledge. Does not own what follows from it (registration.py, pull_redirect.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from server.proxy.inflight_limit import InflightLimit
from server.proxy.upstream import LinkEvents, RemotingUpstream
from server.slave.registration import SlaveConfig, refusal_of_master
from server.wire.codes import RequestCode, ResponseCode
from tiered.errors import UnavailableError
from tiered.remoting.command import VERSION, RemotingCommand
from tiered.remoting.credentials import Credentials

logger = logging.getLogger(__name__)

ASK_EVERY_S = 10.0
ASK_AGAIN_S = 1.0
ANSWER_S = 3.0


class MasterMonitor:
    """Belongs to one event loop. ``file``: the properties of its broker.conf, None where there is none.
    ``credentials`` sign what it is asked."""

    def __init__(
        self, place: SlaveConfig, file: Mapping[str, str] | None, credentials: Credentials | None = None
    ) -> None:
        self._broker, self._file = place.broker, file
        fields = {} if credentials is None else credentials.signed({})
        self._question = RemotingCommand(RequestCode.GET_BROKER_CONFIG, 0, ext_fields=fields)
        events = LinkEvents(on_lost=self._lost)
        self._link = RemotingUpstream(place.broker_address, InflightLimit(), events, place.tls)
        self._task: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()
        self._has_gone = asyncio.Event()
        self._refusal: str | None = "the master has not answered yet"
        self._suspicion: str | None = None
        self._expelled: str | None = None
        self.config: Mapping[str, str] = {}
        """As it last told; empty where it does not."""
        self.version = VERSION
        """Of its answers: what consumers are told, too."""
        self.answers = 0
        """So many came."""
        self._has_answered: bool | None = None
        """Not known before the first look, so that this one is told, too."""
        self.failure = ""
        """Why it does not answer, as far as is known; empty while it does."""
        self.on_refusal: Callable[[], None] = lambda: None
        """There is another reason to stay out than before."""

    @property
    def is_well(self) -> bool:
        """Whether it answered last, by a connection that still stands. Callable from any thread.

        A master that vanishes without a word (its host loses power, its process is stopped) counts as well until it
        leaves a question open: ASK_EVERY_S + ANSWER_S at most. Nothing is lost by that: a consumer is handed back only
        after a look at its queue over there, which fails (hand_back.next_id); what is relayed meanwhile gets no answer,
        and its client asks again; and who replaced that master is not taken for it (registrar.Registrar.heard_of).
        """
        return self._has_answered is True and self._link.is_connected

    def start(self) -> None:
        """Ask from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._has_answered = False  # nothing to warn of
        self._link.close("the slave ends")

    async def heard(self) -> None:
        """Until it has answered for the first time."""
        await self._heard.wait()

    def refusal(self) -> str | None:
        """Why there is no place for us beside it, or None. What it said last holds while it is away."""
        return self._expelled or self._refusal

    def suspect(self, why: str) -> None:
        """Somebody, who may be the master, treats us as a replica. What the master tells of its configuration decides;
        where it does not tell, it ends slave mode until the next start."""
        self._suspicion = why
        self._has_gone.set()

    def redirects(self) -> bool | None:
        """Whether it sends slow consumers away at all (slaveReadEnable); None: it does not tell."""
        told = self.config.get("slaveReadEnable")
        return None if told is None else told.strip().lower() == "true"

    async def _run(self) -> None:
        while True:
            try:
                await self._ask()
            except Exception as error:
                # Unforeseen: nobody may be handed back by what was known before.
                logger.exception("a look at the master failed unexpectedly")
                self._enter(False, repr(error))
            self._has_gone.clear()
            if not self.is_well:
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY_S):
                    await self._has_gone.wait()
                if self.is_well:
                    # Whoever makes us suspicious does not make us ask all the time.
                    await asyncio.sleep(ASK_AGAIN_S)

    async def _ask(self) -> None:
        try:
            answer = await self._link.call(self._question, ANSWER_S)
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
            self._refusal = refusal_of_master(self.config, self._broker)
        else:
            if suspicion is not None and self._expelled is None:
                logger.error("slave mode ends: %s", suspicion)
                self._expelled = suspicion
            if self._file is not None:
                self._refusal = refusal_of_master(self._file, self._broker)
            else:
                self._refusal = (
                    "the master does not tell its configuration: name its file in broker.conf_path, "
                    "or an account of it in broker.credentials_file"
                )
        self._heard.set()
        if self.refusal() not in (None, before):
            self.on_refusal()

    def _lost(self, why: str, had_requests: bool) -> None:
        self._enter(False, why)
        self._has_gone.set()

    def _enter(self, has_answered: bool, why: str) -> None:
        if has_answered != self._has_answered:
            logger.log(logging.INFO if has_answered else logging.WARNING, "the master %s",
                       "answers" if has_answered else "does not answer", extra={"why": why})  # fmt: skip
        self._has_answered, self.failure = has_answered, why


def _properties(body: bytes) -> dict[str, str]:
    lines = (line.partition("=") for line in body.decode("utf-8", "replace").splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in lines}
