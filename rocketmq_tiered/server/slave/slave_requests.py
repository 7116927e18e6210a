"""How slave mode treats each request code. Tables only.

Clients that have the master in their routes send a slave only pulls and heartbeats. Without the master they send the
remaining broker everything. Tools send requests to any address; some change every broker of a cluster and stop at the
first refusal.

Sources: MQClientInstance.findBrokerAddrByTopic, selectBrokerAddr; RemoteBrokerOffsetStore; CommandUtil.
"""

from __future__ import annotations

from typing import Final

from rocketmq_tiered.server.wire.codes import RequestCode as R

RELAYED: Final[frozenset[int]] = frozenset({
    R.QUERY_CONSUMER_OFFSET, R.UPDATE_CONSUMER_OFFSET, R.GET_ALL_TOPIC_CONFIG, R.GET_ALL_DELAY_OFFSET,
    R.GET_CONSUMER_LIST_BY_GROUP, R.CHECK_CLIENT_CONFIG, R.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    R.GET_CONSUMER_CONNECTION_LIST, R.INVOKE_BROKER_TO_RESET_OFFSET, R.QUERY_TOPIC_CONSUME_BY_WHO,
    R.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, R.QUERY_CONSUME_QUEUE, R.QUERY_TOPICS_BY_CONSUMER, R.GET_TOPIC_CONFIG,
    R.GET_SUBSCRIPTIONGROUP_CONFIG, 52, 54, 301, 307, 315, 3004, 3005, 3009, 3010,
})  # fmt: skip
"""Answered by the master: offsets, members, configurations, statistics, access rules (read), group operations. 301:
GET_ALL_GROUP…, 307: a consumer's own state, 315: statistics."""

ACKNOWLEDGED: Final[frozenset[int]] = frozenset({
    R.UPDATE_BROKER_CONFIG, R.DELETE_TOPIC_IN_BROKER, 50, 51, 53, 3001, 3002, 3003, 3006, 3007, 3008,
})  # fmt: skip
"""Changes that tools make at every broker of a cluster. Nothing changes here, and a refusal would stop the tool before
the next broker. 50 to 53 and 3001 on: access rules."""

READ_ONLY: Final[frozenset[int]] = frozenset({
    R.SEND_MESSAGE, R.SEND_MESSAGE_V2, R.SEND_BATCH_MESSAGE, R.SEND_REPLY_MESSAGE, R.SEND_REPLY_MESSAGE_V2,
    R.CONSUMER_SEND_MSG_BACK, R.END_TRANSACTION, R.UPDATE_AND_CREATE_TOPIC, R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    R.DELETE_SUBSCRIPTIONGROUP,
})  # fmt: skip
"""Accepted by a master only: refused, as by any slave."""

BETWEEN_REPLICAS: Final[frozenset[int]] = frozenset({906})
"""EXCHANGE_BROKER_HA_INFO: sent only by a master that starts in a cluster whose slaves may act as master. It waits for
every member to follow it."""
