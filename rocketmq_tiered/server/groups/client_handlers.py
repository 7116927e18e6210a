"""Requests about members of consumer groups: heartbeats, unregistering, lists of members and connections."""

from __future__ import annotations

from collections.abc import Callable

from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response, json_response


def register_client_handlers(
    table: HandlerTable, clients: ClientTable, changed_group: Callable[[], None] = lambda: None
) -> None:
    """Heartbeats, unregistering, member lists. ``changed_group``: called after a heartbeat that changed a group."""

    @table.register(RequestCode.HEART_BEAT)
    async def heartbeat(request: Request) -> Response:
        changed = clients.heartbeat(request)
        if changed:
            changed_group()
        ext = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true" if changed else "false"}
        return Response(ext=ext)

    @table.register(RequestCode.UNREGISTER_CLIENT)
    async def unregister(request: Request) -> Response:
        group = request.text("consumerGroup", "")
        if group:
            clients.leave(request.text("clientID"), group, request.peer)
        return Response()

    @table.register(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    async def members(request: Request) -> Response:
        group = clients.group(request.text("consumerGroup"))
        if group is None:
            return Response(ResponseCode.SYSTEM_ERROR, remark="the group has no consumers")
        return json_response({"consumerIdList": sorted(group.members)})

    @table.register(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    async def connections(request: Request) -> Response:
        name = request.text("consumerGroup")
        group = clients.group(name)
        if group is None:
            return Response(ResponseCode.CONSUMER_NOT_ONLINE, remark=f"the consumer group[{name}] not online")
        return json_response({
            "connectionSet": [
                {
                    "clientAddr": member.peer.address, "clientId": member.client_id,
                    "language": member.language, "version": member.version,
                }
                for member in group.members.values()
            ],
            "subscriptionTable": {s.topic: s.document() for s in group.subscriptions.values()},
            "consumeType": group.consume_type,
            "messageModel": group.message_model,
            "consumeFromWhere": group.consume_from,
        })  # fmt: skip
