"""Routes, topics and groups of archive mode, as a name server and a broker return them.

The archived broker keeps its name, so offsets and locks keep their keys; its address is ours. Topics are read-only.
Source: org.apache.rocketmq.namesrv.processor.DefaultRequestProcessor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rocketmq_tiered.server.backend.backend import Backend, TopicConfig
from rocketmq_tiered.server.groups.client_table import GROUP_CHARS_MAX, is_legal_group
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response, json_response
from tiered.model.queue import LMQ_PREFIX, RETRY_PREFIX, TopicFilter
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.timestamps import wall_ms

PERM_READ = 4
PERM_READ_WRITE = 6
PROXY_TOPIC = "DefaultHeartBeatSyncerTopic"
"""A RocketMQ 5 proxy needs it to start, and creates it; it is kept in memory."""
LIVE_GROUP_SETTINGS = frozenset(
    {
        "brokerId",
        "consumeBroadcastEnable",
        "consumeEnable",
        "consumeFromMinEnable",
        "notifyConsumerIdsChangedEnable",
        "whichBrokerWhenConsumeSlowly",
    }
)
"""Settings of a group that are about reading from the live broker, such as whether it may consume there: not copied."""
MADE_QUEUES_MAX = 16
"""A proxy creates one. Replies about a topic go through all its queues."""
READ_ONLY = "archives are read-only"
VERSION_TEXT = "V4_9_8"


@dataclass
class RouteTable:
    """Routes of one archive. ``address``: dialled by clients."""

    archive: Backend
    address: str
    started_ms: int = field(default_factory=wall_ms)
    earliest_ms: Callable[[], int] = lambda: 0
    """When the first archived message was stored, about; 0 without any."""
    made: dict[str, TopicConfig] = field(default_factory=dict)
    """Topics created here, in memory."""

    def topics(self) -> dict[str, TopicConfig]:
        """Archived topics and those created here."""
        return self.archive.topics() | self.made

    def listed(self) -> dict[str, TopicConfig]:
        """The topics without LMQs."""
        return {name: config for name, config in self.topics().items() if not name.startswith(LMQ_PREFIX)}

    def find(self, topic: str) -> TopicConfig | None:
        """One topic. Every group has a retry topic, as at a broker, even without messages."""
        found = self.made.get(topic) or self.archive.topics().get(topic)
        if found is None and topic.startswith(RETRY_PREFIX) and self.has_group(topic[len(RETRY_PREFIX) :]):
            found = TopicConfig(topic, 1, 1)
        return found

    def has_queue(self, topic: str, queue_id: int) -> bool:
        """Whether clients can read the queue."""
        config = self.find(topic)
        is_routed = config is not None and 0 <= queue_id < max(config.read_queues, 1)
        return is_routed or self.archive.bounds(topic, queue_id) is not None

    def queue_refusal(self, topic: str, queue_id: int) -> Response | None:
        """Return the refusal of a request about a queue that the archive does not have; None if it has the queue."""
        if self.has_queue(topic, queue_id):
            return None
        return Response(
            ResponseCode.TOPIC_NOT_EXIST, remark=f"queue {queue_id} of topic {topic} is not in the archive"
        )

    def has_group(self, name: str) -> bool:
        """Whether the group exists or may be created: names of archived groups are not checked."""
        return is_legal_group(name) or name in self.archive.subscription_groups()

    def group_refusal(self, name: str) -> Response | None:
        """Return the refusal, worded as a broker's, of a request with an impossible group name; None if it is
        possible."""
        if self.has_group(name):
            return None
        shown = name if len(name) <= GROUP_CHARS_MAX else f"{name[:40]}…"
        return Response(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark=f"subscription group [{shown}] does not exist"
        )

    def broker_data(self) -> dict[str, Any]:
        """Return RocketMQ's BrokerData of this server, which takes the archived broker's place as its master (id 0)."""
        return {
            "brokerAddrs": {"0": self.address},
            "brokerName": self.archive.broker,
            "cluster": self.archive.cluster,
        }

    def route(self, topic: str) -> dict[str, Any] | None:
        """Return RocketMQ's TopicRouteData of a topic; None if there is no such topic."""
        config = self.find(topic)
        # A RocketMQ 5 proxy looks up cluster and broker names as topics.
        if config is None and topic in (self.archive.cluster, self.archive.broker):
            config = TopicConfig(topic, 1, 0, PERM_READ)
        if config is None:
            return None
        queue_data = {
            "brokerName": self.archive.broker,
            "perm": config.perm,
            "readQueueNums": config.read_queues,
            "topicSysFlag": 0,
            "writeQueueNums": config.write_queues,
        }
        return {"brokerDatas": [self.broker_data()], "filterServerTable": {}, "queueDatas": [queue_data]}

    def group_config(self, group: str) -> dict[str, Any]:
        """Return the configuration of a group: the archived one, without settings that are about the live broker, or
        the default. Every group may read the archive."""
        default = {
            "brokerId": 0,
            "consumeBroadcastEnable": True,
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "consumeMessageOrderly": False,
            "groupName": group,
            "groupSysFlag": 0,
            "notifyConsumerIdsChangedEnable": True,
            "retryMaxTimes": 16,
            "retryQueueNums": 1,
            "whichBrokerWhenConsumeSlowly": 0,
            "attributes": {},
            "consumeTimeoutMinute": 15,
            "groupRetryPolicy": {"type": "CUSTOMIZED"},
        }
        archived = self.archive.subscription_groups().get(group, {})
        return default | {name: value for name, value in archived.items() if name not in LIVE_GROUP_SETTINGS}


class RouteHandlers:
    """Requests about routes, topics, groups and the broker."""

    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes

    def register(self, table: HandlerTable) -> None:
        """Enter into ``table`` the handlers of requests about routes, topics, groups and the broker itself."""
        table.register(RequestCode.GET_ROUTEINFO_BY_TOPIC)(self.route)
        table.register(RequestCode.GET_BROKER_CLUSTER_INFO)(self.cluster)
        table.register(RequestCode.GET_KV_CONFIG)(self.kv_config)
        table.register(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)(self.topic_list)
        table.register(RequestCode.GET_TOPICS_BY_CLUSTER)(self.topic_list)
        table.register(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)(self.system_topics)
        table.register(RequestCode.UPDATE_AND_CREATE_TOPIC)(self.make_topic)
        table.register(RequestCode.GET_ALL_TOPIC_CONFIG)(self.all_topics)
        table.register(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)(self.all_groups)
        table.register(RequestCode.GET_TOPIC_CONFIG)(self.topic_config)
        table.register(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)(self.group_config)
        table.register(RequestCode.GET_BROKER_CONFIG)(self.broker_config)
        table.register(RequestCode.GET_BROKER_RUNTIME_INFO)(self.runtime)

    async def route(self, request: Request) -> Response:
        found = self._routes.route(request.text("topic"))
        if found is None:
            remark = f"no route info of topic {request.text('topic')}"
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=remark)
        return json_response(found)

    async def cluster(self, request: Request) -> Response:
        """GET_BROKER_CLUSTER_INFO: the archived broker, at this server's address, is the only one of its cluster."""
        archive = self._routes.archive
        return json_response(
            {
                "brokerAddrTable": {archive.broker: self._routes.broker_data()},
                "clusterAddrTable": {archive.cluster: [archive.broker]},
            }
        )

    async def kv_config(self, request: Request) -> Response:
        """GET_KV_CONFIG: empty."""
        return Response(ResponseCode.QUERY_NOT_FOUND, remark="no such configuration")

    async def topic_list(self, request: Request) -> Response:
        """All topics. LMQs are not listed, as at a broker."""
        return json_response({"topicList": sorted(self._routes.listed())})

    async def system_topics(self, request: Request) -> Response:
        archive = self._routes.archive
        system = TopicFilter(cluster=archive.cluster, broker=archive.broker)
        return json_response({"topicList": sorted(filter(system.is_system, self._routes.topics()))})

    async def make_topic(self, request: Request) -> Response:
        """UPDATE_AND_CREATE_TOPIC: refused, except for the topic that a RocketMQ 5 proxy needs, which is kept in
        memory."""
        name = request.text("topic")
        if name != PROXY_TOPIC:
            return Response(ResponseCode.NO_PERMISSION, remark=READ_ONLY)
        read_queues, write_queues = (
            min(max(request.number(field, 1), 1), MADE_QUEUES_MAX)
            for field in ("readQueueNums", "writeQueueNums")
        )
        self._routes.made[name] = TopicConfig(name, read_queues, write_queues, PERM_READ_WRITE)
        return Response()

    async def all_topics(self, request: Request) -> Response:
        topics = {name: config.document() for name, config in self._routes.listed().items()}
        return json_response({"dataVersion": _data_version(self._routes), "topicConfigTable": topics})

    async def all_groups(self, request: Request) -> Response:
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG: the configurations of all archived groups, for mqadmin and RocketMQ 5
        proxies."""
        routes = self._routes
        groups = {name: routes.group_config(name) for name in routes.archive.subscription_groups()}
        return json_response(
            {
                "dataVersion": _data_version(routes),
                "forbiddenTable": {},
                "subscriptionGroupTable": groups,
            }
        )

    async def topic_config(self, request: Request) -> Response:
        config = self._routes.find(request.text("topic"))
        if config is None:
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=f"no topic {request.text('topic')}")
        return json_response(config.document())

    async def group_config(self, request: Request) -> Response:
        """GET_SUBSCRIPTIONGROUP_CONFIG; defaults for a group without a configuration."""
        return json_response(self._routes.group_config(request.text("group")))

    async def broker_config(self, request: Request) -> Response:
        """GET_BROKER_CONFIG: the settings that clients and tools read of a broker, as lines of text."""
        archive = self._routes.archive
        lines = {
            "brokerClusterName": archive.cluster,
            "brokerName": archive.broker,
            "brokerId": "0",
            "brokerRole": "ASYNC_MASTER",
            "brokerPermission": "4",
            "slaveReadEnable": "false",
        }
        return Response(body=("".join(f"{name}={value}\n" for name, value in lines.items()).encode(),))

    async def runtime(self, request: Request) -> Response:
        return json_response({"table": runtime_table(self._routes.started_ms, self._routes.earliest_ms())})


def _data_version(routes: RouteTable) -> dict[str, int]:
    return {"counter": 1, "stateVersion": 0, "timestamp": routes.started_ms}


def runtime_table(started_ms: int, earliest_ms: int = 0) -> dict[str, str]:
    """Return the fields that mqadmin clusterList and brokerStatus read of a broker; most are zero, as no messages are
    taken. clusterList shows the hours since ``earliest_ms``, when the first message was stored (0: unknown);
    ``started_ms``: when this server started."""
    rates = ("putTps", "getTransferedTps", "getTransferredTps", "getFoundTps", "getMissTps", "getTotalTps")
    zeros = (
        "sendThreadPoolQueueSize",
        "pullThreadPoolQueueSize",
        "ackThreadPoolQueueSize",
        "queryThreadPoolQueueSize",
        "sendThreadPoolQueueHeadWaitTimeMills",
        "pullThreadPoolQueueHeadWaitTimeMills",
        "queryThreadPoolQueueHeadWaitTimeMills",
        "ackThreadPoolQueueHeadWaitTimeMills",
        "pageCacheLockTimeMills",
        "timerReadBehind",
        "timerOffsetBehind",
        "timerCongestNum",
        "timerEnqueueTps",
        "timerDequeueTps",
        "EndTransactionQueueSize",
        "EndTransactionThreadPoolQueueCapacity",
        "msgPutTotalYesterdayMorning",
        "msgPutTotalTodayMorning",
        "msgPutTotalTodayNow",
        "msgGetTotalYesterdayMorning",
        "msgGetTotalTodayMorning",
        "msgGetTotalTodayNow",
        "commitLogMinOffset",
        "commitLogMaxOffset",
        "commitLogDiskRatio",
        "dispatchBehindBytes",
    )
    table = dict.fromkeys(rates, "0.0 0.0 0.0") | dict.fromkeys(zeros, "0")
    return table | {
        "brokerVersionDesc": VERSION_TEXT,
        "brokerVersion": "409",
        "brokerActive": "true",
        "earliestMessageTimeStamp": str(earliest_ms or started_ms),
        "bootTimestamp": str(started_ms),
        "runtime": "[ 0 days ]",
    }
