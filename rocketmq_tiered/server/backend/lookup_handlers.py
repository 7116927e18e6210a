"""Lookups in the archive: offsets by time, bounds, earliest time, messages by id and key, queue rows; and refused
writes. Sources: AdminBrokerProcessor, QueryMessageProcessor.
"""

from typing import Any

from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.route_handlers import READ_ONLY, RouteTable
from rocketmq_tiered.server.groups.client_table import TAG
from rocketmq_tiered.server.groups.queue_locks import MessageQueue, queue_map
from rocketmq_tiered.server.groups.subscription_filter import filter_of
from rocketmq_tiered.server.wire.request import (
    BadRequestError,
    HandlerTable,
    Request,
    Response,
    json_response,
)
from tiered.errors import UsageError
from tiered.remoting.command import RequestCode, ResponseCode

UNIQUE_KEY_COUNT = 32
KEY_COUNT_MAX = 64
ROWS_MAX = 1024
REFUSED = (
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
    RequestCode.END_TRANSACTION,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.DELETE_SUBSCRIPTIONGROUP,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.UPDATE_BROKER_CONFIG,
)


class LookupHandlers:
    """Handlers of single lookups."""

    def __init__(self, archive: Backend, routes: RouteTable) -> None:
        self._archive, self._routes = archive, routes

    def register(self, table: HandlerTable) -> None:
        """Enter into ``table`` the handlers of searches by time, of offsets' bounds, of messages by id and key, of
        consume-queue entries and of statistics, and the refusal of writes."""
        table.register(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)(self.search)
        table.register(RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)(self.bound)
        table.register(RequestCode.GET_EARLIEST_MSG_STORETIME)(self.earliest)
        table.register(RequestCode.VIEW_MESSAGE_BY_ID)(self.view)
        table.register(RequestCode.QUERY_MESSAGE)(self.by_key)
        table.register(RequestCode.GET_TOPIC_STATS_INFO)(self.topic_stats)
        table.register(RequestCode.QUERY_CONSUME_QUEUE)(self.rows)
        table.register(RequestCode.CHECK_CLIENT_CONFIG)(self.check_client)
        table.register(*REFUSED)(self.refuse)

    async def search(self, request: Request) -> Response:
        """SEARCH_OFFSET_BY_TIMESTAMP: the first offset stored at or after a time; 0 for a queue that is not
        archived."""
        topic, queue_id = request.text("topic"), request.number("queueId")
        if self._archive.bounds(topic, queue_id) is None:
            return Response(ext={"offset": "0"})
        upper = request.text("boundaryType", "LOWER").upper() == "UPPER"
        offset = await self._archive.offset_by_time(topic, queue_id, request.number("timestamp"), upper=upper)
        return Response(ext={"offset": str(offset)})

    async def bound(self, request: Request) -> Response:
        """GET_MIN_OFFSET and GET_MAX_OFFSET; 0 for an empty or unknown queue."""
        low, high = self._archive.bounds(request.text("topic"), request.number("queueId")) or (0, 0)
        return Response(ext={"offset": str(low if request.code == RequestCode.GET_MIN_OFFSET else high)})

    async def earliest(self, request: Request) -> Response:
        topic, queue_id = request.text("topic"), request.number("queueId")
        bounds = self._archive.bounds(topic, queue_id)
        stored_ms = -1 if bounds is None else await self._archive.stored_ms(topic, queue_id, bounds.minimum)
        return Response(ext={"timestamp": str(stored_ms)})

    async def view(self, request: Request) -> Response:
        """VIEW_MESSAGE_BY_ID: by physical offset."""
        record = await self._archive.message_at_phys(request.number("offset"))
        if record is None:
            return Response(
                ResponseCode.SYSTEM_ERROR,
                remark=f"no message begins at physical offset {request.number('offset')}",
            )
        return Response(body=(record,))

    async def by_key(self, request: Request) -> Response:
        """QUERY_MESSAGE by key or unique key."""
        records = await records_by_key(self._archive, request)
        if not records:
            return Response(ResponseCode.QUERY_NOT_FOUND, remark="no message with this key")
        ext = {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        return Response(ext=ext, body=records)

    async def topic_stats(self, request: Request) -> Response:
        """GET_TOPIC_STATS_INFO: minimum and maximum offset of every queue of a topic, and when its newest message was
        stored."""
        topic = request.text("topic")
        config = self._routes.find(topic)
        if config is None:
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=f"topic {topic} is not in the archive")
        table: dict[MessageQueue, Any] = {}
        for queue_id in range(max(config.read_queues, config.write_queues)):
            bounds = self._archive.bounds(topic, queue_id)
            low, high = (bounds.minimum, bounds.maximum) if bounds is not None else (0, 0)
            last_ms = self._archive.last_stored_ms(topic, queue_id) if high > low else 0
            table[MessageQueue(self._archive.broker, topic, queue_id)] = {
                "lastUpdateTimestamp": last_ms,
                "maxOffset": high,
                "minOffset": low,
            }
        return Response(body=(queue_map(table, {"topicPutTps": 0.0}),))

    async def rows(self, request: Request) -> Response:
        """QUERY_CONSUME_QUEUE, for ``mqadmin queryCq``: consume-queue entries of a queue, from an offset on."""
        topic, queue_id = request.text("topic"), request.number("queueId")
        bounds = self._archive.bounds(topic, queue_id)
        if bounds is None:
            return Response(
                ResponseCode.SYSTEM_ERROR, remark=f"{topic} queue {queue_id} is not in the archive"
            )
        index, count = request.number("index"), min(max(request.number("count", 32), 1), ROWS_MAX)
        units = await self._archive.units(topic, queue_id, max(index, bounds.minimum), count)
        return json_response(
            {
                "maxQueueIndex": bounds.maximum,
                "minQueueIndex": bounds.minimum,
                "queueData": [
                    {
                        "eval": False,  # whether a group's filter matched; a broker without one says false
                        "physicOffset": unit.phys,
                        "physicSize": unit.size,
                        "tagsCode": unit.tags_code,
                    }
                    for unit in units
                ],
            }
        )

    async def check_client(self, request: Request) -> Response:
        """CHECK_CLIENT_CONFIG: reply whether the filter expression of a consumer, which sends it before it starts, can
        be parsed."""
        data = request.document().get("subscriptionData") or {}
        if not isinstance(data, dict):
            raise BadRequestError("subscriptionData in the body of the request is not a JSON object")
        try:
            filter_of(str(data.get("subString") or "*"), str(data.get("expressionType") or TAG))
        except UsageError as error:
            return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
        return Response()

    async def refuse(self, request: Request) -> Response:
        """Writes are refused."""
        return Response(ResponseCode.NO_PERMISSION, remark=READ_ONLY)


def is_unique_key(request: Request) -> bool:
    """Whether a QUERY_MESSAGE is for a unique key."""
    return request.flag("_UNIQUE_KEY_QUERY") or request.text("indexType", "K") == "U"


def key_count(request: Request) -> int:
    """The limit of a QUERY_MESSAGE."""
    return (
        UNIQUE_KEY_COUNT
        if is_unique_key(request)
        else min(max(request.number("maxNum", 32), 1), KEY_COUNT_MAX)
    )


async def records_by_key(archive: Backend, request: Request) -> list[bytes]:
    """Return the archived records that the request QUERY_MESSAGE searches, by key or unique key."""
    is_unique = is_unique_key(request)
    # mqadmin's queryMsgById searches three days by a unique key. A message in an archive is usually older.
    begin_ms = 0 if is_unique else request.number("beginTimestamp", 0)
    return await archive.messages_by_key(
        request.text("topic"),
        request.text("key"),
        is_unique=is_unique,
        count=key_count(request),
        begin_ms=begin_ms,
        end_ms=request.number("endTimestamp", (1 << 63) - 1),
    )
