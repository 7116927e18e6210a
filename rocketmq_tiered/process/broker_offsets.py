"""Reads the broker's offsets (confirm offset, end of log) over the remoting protocol.

Owns the connection, and logs when the broker stops and starts answering.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from tiered.broker_store.bound import BrokerOffsets
from tiered.errors import TieredError, UnavailableError
from tiered.remoting.client import BrokerClient
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import ClientTls
from uploader.bound_source import NO_ADDRESS

logger = logging.getLogger(__name__)


Connect = Callable[[str, float, Credentials | None, ClientTls | None], BrokerClient]


class BrokerOffsetsClient:
    """Reads the offsets of one broker; of none if ``address`` is empty. Not thread-safe.

    ``name``: the expected broker name, or empty. Another broker's offsets would be a wrong bound, or make the log look
    truncated.
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
        self.address = address
        self._timeout_s = timeout_s
        self._credentials, self._tls = credentials, tls
        self._connect = connect
        self._has_warned = False
        self._name = name
        self._client: BrokerClient | None = None
        self.silence = "" if address else NO_ADDRESS
        """Why the offsets are unknown; empty while the broker answers."""
        self._config: Mapping[str, str] = {}

    @property
    def is_master(self) -> bool:
        """Whether the broker says that it is the master; false while it does not answer."""
        role = self._config.get("brokerRole", "")
        return not self.silence and role.endswith("MASTER") and self._config.get("brokerId", "0") == "0"

    def ask(self) -> BrokerOffsets | None:
        """The broker's present offsets; None if it does not answer or has no address, which is logged once."""
        if not self.address:
            if not self._has_warned:
                logger.warning(
                    "the broker's address is unknown", extra={"cause": "broker.address is not set"}
                )
            self._has_warned = True
            return None
        try:
            offsets = self._read()
        except TieredError as error:
            self.close()
            if not self.silence:
                logger.warning(
                    "the broker does not answer", extra={"address": self.address, "cause": str(error)}
                )
            self.silence = f"it does not answer at {self.address} ({error.message})"
            return None
        if self.silence:
            logger.info("the broker answers again", extra={"address": self.address})
        self.silence = ""
        return offsets

    def _read(self) -> BrokerOffsets:
        if self._client is None:
            self._client = self._connect(self.address, self._timeout_s, self._credentials, self._tls)
            self._config = self._client.broker_config() or {}
            self._refuse_another(self._config)
        # First, so that a dead broker costs one timeout.
        confirm_phys = self._client.confirm_offset()
        try:
            info = self._client.runtime_info()
        except UnavailableError:
            # Some brokers, such as one on IPv6, fail to answer this but report the confirm offset.
            if confirm_phys is None:
                raise
            info = {}
        return BrokerOffsets(
            max_phys=_number(info, "commitLogMaxOffset"),
            confirm_phys=confirm_phys,
            dispatch_behind_bytes=_number(info, "dispatchBehindBytes"),
            is_dispatch_certain=_is_dispatch_certain(self._config, info, confirm_phys),
            config=self._config,
            version=info.get("brokerVersionDesc", ""),
        )

    def _refuse_another(self, config: Mapping[str, str]) -> None:
        """Without the right to read the configuration the name is not checked."""
        name = config.get("brokerName", "") if self._name else ""
        if name not in ("", self._name):
            raise UnavailableError(
                f"the broker at {self.address} is {name}, but the store is that of {self._name}",
                hint="set broker.address, or brokerIP1 and listenPort of broker.conf",
            )

    def close(self) -> None:
        """Disconnect; the next request connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _is_dispatch_certain(
    config: Mapping[str, str], info: Mapping[str, str], confirm_phys: int | None
) -> bool:
    """Whether the broker's dispatch lag is exact. 5.x counts undispatched bytes from an internal confirm offset
    (ReputMessageService.behind), which some configurations do not report. ConcurrentReputMessageService advances
    before consume queues are written."""
    if not config:
        return confirm_phys is None  # only a 5.x reports one
    if "enableControllerMode" not in config:
        return True  # 4.9 counts from the end of the log
    uncertain = "enableControllerMode", "duplicationEnable", "enableBuildConsumeQueueConcurrently"
    if "true" in (config.get(name) for name in uncertain):
        return False
    return config.get("flushDiskType") != "SYNC_FLUSH" or info.get("remainHowManyDataToFlush") == "0 B"


def _number(info: dict[str, str], name: str) -> int | None:
    text = info.get(name, "")
    return int(text) if text.lstrip("-").isdecimal() else None
