"""A store of a broker with messages of the gateway topic, and what to put into them."""

from collections.abc import Mapping

from tests.kernels.record_builder import Message, encode, properties
from tests.uploader.small_broker import SmallBroker

TOPIC = "TIERED_TIMERS"


class TimerBroker(SmallBroker):
    """``send_with``: messages with properties."""

    def send_with(
        self, pairs: Mapping[str, str], *, topic: str = TOPIC, body: str = "body", sys_flag: int = 0
    ) -> None:
        """One message to queue 0."""
        self._properties = properties(*((name.encode(), value.encode()) for name, value in pairs.items()))
        self._sys_flag = sys_flag
        self.send(1, topic, text=body)
        self._properties, self._sys_flag = b"", 0

    def timer(self, key: str, deliver_ms: int, to: str = "orders", **more: str) -> None:
        """A timer with body ``key``."""
        pairs = {"UNIQ_KEY": key, "TIERED_TOPIC": to, "TIERED_DELIVER_MS": str(deliver_ms), **more}
        self.send_with(pairs, body=key)

    def _record(self, topic: str, offset: int, text: str) -> bytes:
        message = Message(
            topic.encode(),
            0,
            offset,
            f"{text} {offset}".encode(),
            getattr(self, "_properties", b""),
            getattr(self, "_sys_flag", 0),
            self.store_ms,
        )
        return encode(message, self.phys)
