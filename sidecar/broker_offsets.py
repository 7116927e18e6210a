"""The broker's own offsets about its log, asked over the wire when somebody says where the broker is.

Owns the connection and the log line when the broker stops or starts answering. Does not decide the bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from tiered.broker_store.bound import BrokerOffsets
from tiered.errors import TieredError, UnavailableError
from tiered.remoting.client import BrokerClient
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import ClientTls

logger = logging.getLogger(__name__)

Connect = Callable[[str, float, Credentials | None, ClientTls | None], BrokerClient]


class BrokerOffsetsClient:
    """Asks one broker. ``address`` empty: there is nobody to ask. ``name``: what it must call itself to be believed,
    empty: anything. Another broker's offsets would be a wrong bound, or make the log look cut. Not thread-safe.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
        *,
        name: str = "",
        connect: Connect = BrokerClient,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._credentials, self._tls = credentials, tls
        self._connect = connect
        self._name = name
        self._client: BrokerClient | None = None
        self._is_silent = False
        self._config: Mapping[str, str] = {}

    def ask(self) -> BrokerOffsets | None:
        """What the broker says now; None when it does not answer, said once in the log."""
        if not self._address:
            return None
        try:
            offsets = self._read()
        except TieredError as error:
            self.close()
            if not self._is_silent:
                logger.warning(
                    "the broker does not answer", extra={"address": self._address, "cause": str(error)}
                )
            self._is_silent = True
            return None
        if self._is_silent:
            logger.info("the broker answers again", extra={"address": self._address})
        self._is_silent = False
        return offsets

    def _read(self) -> BrokerOffsets:
        if self._client is None:
            self._client = self._connect(self._address, self._timeout_s, self._credentials, self._tls)
            self._config = self._client.broker_config() or {}
            self._refuse_another(self._config)
        # Asked first: where nobody answers, this is the only time limit that is waited for.
        confirm_phys = self._client.confirm_offset()
        try:
            info = self._client.runtime_info()
        except UnavailableError:
            # Some brokers fail to put it together (an IPv6 one does), and still say how far their log goes.
            if confirm_phys is None:
                raise
            info = {}
        return BrokerOffsets(
            max_phys=_number(info, "commitLogMaxOffset"),
            confirm_phys=confirm_phys,
            dispatch_behind_bytes=_number(info, "dispatchBehindBytes"),
            is_confirm_certain=_is_confirm_certain(self._config, info, confirm_phys),
            config=self._config,
        )

    def _refuse_another(self, config: Mapping[str, str]) -> None:
        """Who may not ask for the configuration is not told, and goes on."""
        said = config.get("brokerName", "") if self._name else ""
        if said not in ("", self._name):
            raise UnavailableError(
                f"{self._address} is broker {said}, not {self._name} whose store this is",
                hint="set broker.address, or brokerIP1 and listenPort of broker.conf",
            )

    def close(self) -> None:
        """Hang up; the next question connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _is_confirm_certain(config: Mapping[str, str], info: Mapping[str, str], confirm_phys: int | None) -> bool:
    """Whether the broker's confirm offset is what it says of its log and replicas. 5.x counts what is not dispatched
    from its own one (DefaultMessageStore.behind), which these keep to themselves."""
    if not config:
        return confirm_phys is None  # who may not know its configuration knows by this that it is a 5.x
    if "enableControllerMode" not in config:
        return True  # 4.9 counts from the end of the log
    if "true" in (config["enableControllerMode"], config.get("duplicationEnable")):
        return False
    return config.get("flushDiskType") != "SYNC_FLUSH" or info.get("remainHowManyDataToFlush") == "0 B"


def _number(info: dict[str, str], name: str) -> int | None:
    text = info.get(name, "")
    return int(text) if text.lstrip("-").isdecimal() else None
