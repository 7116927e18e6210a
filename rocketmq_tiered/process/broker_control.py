"""A broker being retired or taken back: its permission, the end of its log, groups' offsets, and what it still holds.

Sources: RequestCode, AdminBrokerProcessor, ConsumerManageProcessor, ScheduleMessageService, PopReviveService.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rocketmq_tiered.server.wire.codes import RequestCode
from tiered.errors import AccessDeniedError, CorruptionError, UnavailableError
from tiered.formats import fastjson
from tiered.model.queue import SCHEDULE_TOPIC
from tiered.remoting.client import SUCCESS, BrokerClient, is_refusal
from tiered.remoting.command import RemotingCommand

PERM_NONE: Final = 0
PERM_READ: Final = 4
PERM_READ_WRITE: Final = 6
DELAY_LEVELS: Final = 18
REVIVE_QUEUES: Final = 8
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
HALF_GROUP: Final = "CID_RMQ_SYS_TRANS"
REVIVE_TOPIC: Final = "rmq_sys_REVIVE_LOG_"
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"

GroupOffsets = dict[str, dict[int, int]]
"""topic@group -> queue id -> offset."""


class Leftover(NamedTuple):
    """Messages that the broker has accepted and not delivered."""

    what: str
    messages: int


class BrokerControl:
    """Requests that change a broker. The caller closes ``client``."""

    def __init__(self, client: BrokerClient, cluster: str) -> None:
        self._client, self._cluster = client, cluster

    def permission(self) -> int:
        """brokerPermission."""
        config = self._client.broker_config()
        if config is None or "brokerPermission" not in config:
            raise AccessDeniedError(
                "the broker refuses to show its configuration",
                hint="set broker.credentials_file to an account of an administrator",
            )
        return int(config["brokerPermission"])

    def set_permission(self, permission: int) -> None:
        """Set brokerPermission; brokers write it to their configuration file."""
        self._done(RequestCode.UPDATE_BROKER_CONFIG, {}, f"brokerPermission={permission}\n".encode())

    def log_end(self) -> int:
        """commitLogMaxOffset."""
        return int(self._client.runtime_info().get("commitLogMaxOffset", "0"))

    def group_offsets(self) -> GroupOffsets:
        """All of them."""
        table = self._table(RequestCode.GET_ALL_CONSUMER_OFFSET)
        return {
            str(name): {int(q): int(offset) for q, offset in queues.items()} for name, queues in table.items()
        }

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The end of a queue, 0 for a missing one."""
        fields = {"topic": topic, "queueId": str(queue_id)}
        answer = self._client.call(RequestCode.GET_MAX_OFFSET, fields)
        return int(answer.ext_fields.get("offset", "0")) if answer.code == SUCCESS else 0

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set a group's offset."""
        fields = {
            "consumerGroup": group, "topic": topic, "queueId": str(queue_id), "commitOffset": str(offset),
        }  # fmt: skip
        self._done(RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    def leftovers(self) -> list[Leftover]:
        """What it holds for later: timers, delayed messages, half messages, popped messages."""
        timers = max(0, int(self._client.runtime_info().get("timerCongestNum", "0") or 0))
        delays = {
            int(level): int(offset) for level, offset in self._table(RequestCode.GET_ALL_DELAY_OFFSET).items()
        }
        delayed = sum(
            max(0, self.max_offset(SCHEDULE_TOPIC, level - 1) - delays.get(level, 0))
            for level in range(1, DELAY_LEVELS + 1)
        )
        offsets = self.group_offsets()
        half = self._behind(offsets, HALF_TOPIC, HALF_GROUP, 1)
        popped = self._behind(offsets, f"{REVIVE_TOPIC}{self._cluster}", REVIVE_GROUP, REVIVE_QUEUES)
        found = (
            Leftover("timers", timers), Leftover("delayed messages", delayed),
            Leftover("half messages", half), Leftover("popped messages", popped),
        )  # fmt: skip
        return [leftover for leftover in found if leftover.messages]

    def _behind(self, offsets: GroupOffsets, topic: str, group: str, queues: int) -> int:
        done = offsets.get(f"{topic}@{group}", {})
        return sum(max(0, self.max_offset(topic, q) - done.get(q, 0)) for q in range(queues))

    def _table(self, code: RequestCode) -> Mapping[str, Any]:
        try:
            document = fastjson.loads(self._done(code, {}).body or b"{}")
        except CorruptionError as error:
            raise UnavailableError(f"malformed response of the broker: {error}") from error
        table = document.get("offsetTable") if isinstance(document, dict) else None
        return table if isinstance(table, dict) else {}

    def _done(self, code: RequestCode, fields: Mapping[str, str], body: bytes = b"") -> RemotingCommand:
        answer = self._client.call(code, fields, body)
        if is_refusal(answer):
            raise AccessDeniedError(
                f"the broker refuses request {int(code)}: {answer.remark or answer.code}",
                hint="set broker.credentials_file to an account of an administrator",
            )
        if answer.code != SUCCESS:
            raise UnavailableError(
                f"the broker failed on request {int(code)}: {answer.remark or answer.code}"
            )
        return answer
