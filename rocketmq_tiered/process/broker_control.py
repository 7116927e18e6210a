"""A broker being retired or taken back: its permission, the ends of its queues, groups' offsets, and what it still
holds.

A broker of 5.x notes pops in a topic of its own, by timers that end when what was popped comes back: unless it was
acknowledged, to a retry topic that only pops read. How far that topic is settled it does not say.

Sources: RequestCode, AdminBrokerProcessor, ConsumerManageProcessor, ScheduleMessageService, PopReviveService.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tiered.errors import AccessDeniedError
from tiered.model.queue import RETRY_PREFIX, SCHEDULE_TOPIC, TopicFilter
from tiered.remoting.client import ADMIN_HINT, BrokerClient, document_of
from tiered.remoting.command import RequestCode, ResponseCode

PERM_NONE: Final = 0
PERM_READ: Final = 4
PERM_READ_WRITE: Final = 6
DELAY_LEVELS: Final = 18
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
HALF_GROUP: Final = "CID_RMQ_SYS_TRANS"
REVIVE_TOPIC: Final = "rmq_sys_REVIVE_LOG_"

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
        """The broker's brokerPermission: 6 for reading and writing, 4 for reading, 0 for neither. Raises
        AccessDeniedError if the account may not read the configuration."""
        config = self._client.broker_config()
        if config is None or "brokerPermission" not in config:
            raise AccessDeniedError(
                "the broker refuses to show its configuration, which has brokerPermission",
                hint=ADMIN_HINT,
            )
        return int(config["brokerPermission"])

    def set_permission(self, permission: int) -> None:
        """Set brokerPermission; brokers write it to their configuration file."""
        self._client.request(
            RequestCode.UPDATE_BROKER_CONFIG, body=f"brokerPermission={permission}\n".encode()
        )

    def produced(self) -> dict[tuple[str, int], int]:
        """The max offset of each queue, by (topic, queue id), of the topics that producers send to,
        but of no system topics, retry topics and dead letters."""
        system = TopicFilter(cluster=self._cluster)
        topics = self._topics().items()
        return {
            (name, q): self.max_offset(name, q)
            for name, count in topics
            if not name.startswith("%") and not system.is_system(name)
            for q in range(count)
        }

    def _topics(self) -> Mapping[str, int]:
        return {name: int(found["writeQueueNums"]) for name, found in (self._client.topics() or {}).items()}

    def group_offsets(self) -> GroupOffsets:
        """The committed offsets of all groups."""
        table = self._table(RequestCode.GET_ALL_CONSUMER_OFFSET)
        return {
            str(name): {int(q): int(offset) for q, offset in queues.items()} for name, queues in table.items()
        }

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The end of a queue, 0 for a missing one."""
        fields = {"topic": topic, "queueId": str(queue_id)}
        answer = self._client.call(RequestCode.GET_MAX_OFFSET, fields)
        return int(answer.ext_fields.get("offset", "0")) if answer.code == ResponseCode.SUCCESS else 0

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the offset that a consumer group has committed for a queue. Raises AccessDeniedError or UnavailableError
        if the broker refuses."""
        fields = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": str(queue_id),
            "commitOffset": str(offset),
        }
        self._client.request(RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    def leftovers(self) -> list[Leftover]:
        """What the broker has accepted and delivers later: timers, messages with a delay level, transactions that are
        not decided (half messages), and messages that pop consumers get again. Kinds without messages are skipped."""
        # A broker notes popped messages by timers too; these are no messages that it delivers.
        timers = int(self._client.runtime_info().get("timerCongestNum", "0") or 0) - self._revive_timers()
        delays = {
            int(level): int(offset) for level, offset in self._table(RequestCode.GET_ALL_DELAY_OFFSET).items()
        }
        delayed = sum(
            max(0, self.max_offset(SCHEDULE_TOPIC, level - 1) - delays.get(level, 0))
            for level in range(1, DELAY_LEVELS + 1)
        )
        offsets = self.group_offsets()
        half = max(
            0, self.max_offset(HALF_TOPIC, 0) - offsets.get(f"{HALF_TOPIC}@{HALF_GROUP}", {}).get(0, 0)
        )
        found = (
            Leftover("timers", timers),
            Leftover("delayed messages", delayed),
            Leftover("half messages", half),
            Leftover("messages to be popped again", self._to_pop_again(offsets)),
        )
        return [leftover for leftover in found if leftover.messages > 0]

    def popped(self) -> list[Leftover]:
        """What consumers have popped and may still acknowledge. Some while they pop. A broker notes it in memory for
        10 s, then by a timer."""
        count = self._revive_timers()
        return [Leftover("popped messages", count)] if count > 0 else []

    def _revive_timers(self) -> int:
        answer = self._client.call(RequestCode.GET_TIMER_METRICS, {})
        table = document_of(answer) if answer.code == ResponseCode.SUCCESS else {}
        return int(table.get("timingCount", {}).get(f"{REVIVE_TOPIC}{self._cluster}", {}).get("count", 0))

    def _to_pop_again(self, offsets: GroupOffsets) -> int:
        """How many messages wait in retry topics of pop consumers, whose names are %RETRY%group_topic or
        %RETRY%group+topic; those of other consumers are %RETRY%group. ``offsets``: what groups have committed."""
        groups = {name.rpartition("@")[2] for name in offsets}
        names = [name for name in self._topics() if name.startswith(RETRY_PREFIX)]
        count = 0
        for name in (name for name in names if name.removeprefix(RETRY_PREFIX) not in groups):
            consumed = [queues.get(0, 0) for key, queues in offsets.items() if key.startswith(f"{name}@")]
            count += max(0, self.max_offset(name, 0) - max(consumed, default=0))
        return count

    def _table(self, code: RequestCode) -> Mapping[str, Any]:
        table = document_of(self._client.request(code)).get("offsetTable")
        return table if isinstance(table, dict) else {}
