"""CONSUMER_SEND_MSG_BACK (36): a consumer sends a message back for a retry."""

from __future__ import annotations

from collections.abc import Callable

from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.retries.retry_queue import RetryQueues
from rocketmq_tiered.server.retries.retry_record import encode_retry
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tiered.errors import FencedError, StoreFullError, UsageError
from tiered.formats.record import decode_record


class RetryHandlers:
    """Accepts retry messages. A client whose request is refused consumes the message again after five seconds."""

    def __init__(
        self,
        archive: Backend,
        routes: RouteTable,
        retries: RetryQueues,
        refusal_of_record: Callable[[Request, bytes, int], Response | None] = lambda *_: None,
    ) -> None:
        """``refusal_of_record``: the reply to a client that may not read the message's topic, which a retry would
        reveal whatever topic the request names."""
        self._archive, self._routes, self._retries = archive, routes, retries
        self._refusal_of_record = refusal_of_record

    def register(self, table: HandlerTable) -> None:
        table.register(RequestCode.CONSUMER_SEND_MSG_BACK)(self.send_back)

    async def send_back(self, request: Request) -> Response:
        """CONSUMER_SEND_MSG_BACK; acknowledged once it is durable."""
        group, phys = request.name("group"), request.number("offset")
        if (refusal := self._routes.group_refusal(group)) is not None:
            return refusal
        config = self._routes.group_config(group)
        if int(config["retryQueueNums"]) <= 0:
            return Response()  # as at a broker: the group has no retries
        data = await self._archive.message_at_phys(phys)
        if data is None:
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"look message by offset failed, {phys}")
        if (refusal := self._refusal_of_record(request, data, phys)) is not None:
            return refusal
        source = decode_record(data)
        try:
            message = encode_retry(
                source,
                group,
                delay_level=request.number("delayLevel"),
                times_max=request.number("maxReconsumeTimes", int(config["retryMaxTimes"])),
                address=self._routes.address,
            )
            await self._retries.add(message)
        except FencedError as error:
            return Response(ResponseCode.NO_PERMISSION, remark=str(error))
        except StoreFullError as error:
            return Response(ResponseCode.SYSTEM_BUSY, remark=str(error))
        except UsageError as error:
            return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
        return Response()
