"""The one decoder of a request's fields: which fields each request code has, and their values under one name.

Access rules judge these values, handlers execute them and the audit log shows them. Sends of version 2 write one letter
for each name. A field that a code does not have (another code's, a name in other cases) is `undeclared`: brokers ignore
it, access rules refuse it.

Sources: classes *RequestHeader of 4.9.7, 5.3.3 and 5.5.0, RpcRequestHeader, AclClientRPCHook, StreamTypeRPCHook,
DynamicalExtFieldRPCHook; internal/request.go of rocketmq-client-go 2.1.2.
"""

from collections.abc import Mapping
from typing import Final

from tiered.remoting.command import RemotingCommand
from tiered.remoting.command import RequestCode as R
from tiered.remoting.credentials import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE

COMMON: Final = frozenset(
    {ACCESS_KEY, SIGNATURE, SECURITY_TOKEN, "OnsChannel", "SignatureMethod"}
    | {"ns", "nsd", "bname", "oway", "lo", "ReqT", "__ZONE_NAME", "__ZONE_MODE"}
)
"""Fields of any request: accounts, and what clients of 5.x add. No broker reads a topic or a group in them."""
LETTERS: Final[Mapping[str, str]] = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
    "n": "bname",
}
"""Fields of sends of version 2."""
LETTERED: Final = frozenset(map(int, (R.SEND_MESSAGE_V2, R.SEND_BATCH_MESSAGE, R.SEND_REPLY_MESSAGE_V2)))
_SEND: Final = " ".join(LETTERS.values())
_QUEUE: Final = "topic queueId"
_PULL: Final = (
    "consumerGroup topic queueId queueOffset maxMsgNums sysFlag commitOffset suspendTimeoutMillis subscription "
    "subVersion expressionType maxMsgBytes requestSource proxyFrowardClientId liteTopic"
)
_FIELDS: Final[Mapping[int, str]] = {
    R.SEND_MESSAGE: _SEND,
    R.SEND_REPLY_MESSAGE: _SEND,
    R.SEND_MESSAGE_V2: " ".join(LETTERS),
    R.SEND_BATCH_MESSAGE: " ".join(LETTERS),
    R.SEND_REPLY_MESSAGE_V2: " ".join(LETTERS),
    R.END_TRANSACTION: "topic producerGroup tranStateTableOffset commitLogOffset commitOrRollback "
    "fromTransactionCheck msgId transactionId",
    R.RECALL_MESSAGE: "producerGroup topic recallHandle",
    R.PULL_MESSAGE: _PULL,
    R.LITE_PULL_MESSAGE: _PULL,
    R.POP_MESSAGE: "consumerGroup topic queueId maxMsgNums invisibleTime pollTime bornTime initMode expType exp order "
    "attemptId",
    R.PEEK_MESSAGE: "topic queueId maxMsgNums consumerGroup",
    R.NOTIFICATION: "consumerGroup topic queueId pollTime bornTime order attemptId expType exp",
    R.POLLING_INFO: "consumerGroup topic queueId",
    R.ACK_MESSAGE: "consumerGroup topic queueId extraInfo offset liteTopic",
    R.BATCH_ACK_MESSAGE: "",
    R.CHANGE_MESSAGE_INVISIBLETIME: "consumerGroup topic queueId extraInfo offset invisibleTime liteTopic suspend",
    R.CONSUMER_SEND_MSG_BACK: "offset group delayLevel originMsgId originTopic unitMode maxReconsumeTimes",
    R.QUERY_MESSAGE: "topic key maxNum beginTimestamp endTimestamp indexType lastKey _UNIQUE_KEY_QUERY",
    R.VIEW_MESSAGE_BY_ID: "topic offset",
    R.QUERY_CONSUMER_OFFSET: "consumerGroup topic queueId setZeroIfNotFound",
    R.UPDATE_CONSUMER_OFFSET: "consumerGroup topic queueId commitOffset",
    R.INVOKE_BROKER_TO_RESET_OFFSET: "group topic queueId offset timestamp isForce",
    R.SEARCH_OFFSET_BY_TIMESTAMP: "topic queueId timestamp boundaryType liteTopic",
    R.GET_MAX_OFFSET: "topic queueId committed",
    R.GET_MIN_OFFSET: _QUEUE,
    R.GET_EARLIEST_MSG_STORETIME: _QUEUE,
    R.GET_TOPIC_STATS_INFO: "topic",
    R.GET_CONSUME_STATS: "consumerGroup topic topicList",
    R.GET_BROKER_CONSUME_STATS: "isOrder",
    R.QUERY_CONSUME_QUEUE: "topic queueId index count consumerGroup",
    R.GET_ALL_CONSUMER_OFFSET: "",
    R.GET_ALL_DELAY_OFFSET: "",
    R.HEART_BEAT: "",
    R.UNREGISTER_CLIENT: "clientID producerGroup consumerGroup",
    R.CHECK_CLIENT_CONFIG: "",
    R.GET_CONSUMER_LIST_BY_GROUP: "consumerGroup",
    R.GET_CONSUMER_CONNECTION_LIST: "consumerGroup",
    R.GET_CONSUMER_RUNNING_INFO: "consumerGroup clientId jstackEnable",
    R.LOCK_BATCH_MQ: "",
    R.UNLOCK_BATCH_MQ: "",
    R.QUERY_ASSIGNMENT: "",
    R.SET_MESSAGE_REQUEST_MODE: "",
    R.GET_ROUTEINFO_BY_TOPIC: "topic acceptStandardJsonOnly",
    R.GET_TOPIC_CONFIG: "topic",
    R.GET_SUBSCRIPTIONGROUP_CONFIG: "group",
    R.QUERY_TOPIC_CONSUME_BY_WHO: "topic",
    R.QUERY_TOPICS_BY_CONSUMER: "group",
    R.GET_ALL_TOPIC_CONFIG: "topicSeq dataVersion maxTopicNum",
    R.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: "",
    R.GET_TOPICS_BY_CLUSTER: "cluster",
    R.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: "",
    R.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: "groupSeq dataVersion maxGroupNum",
    R.GET_KV_CONFIG: "namespace key",
    R.GET_BROKER_CLUSTER_INFO: "",
    R.GET_BROKER_CONFIG: "",
    R.GET_BROKER_RUNTIME_INFO: "",
    R.UPDATE_BROKER_CONFIG: "",
    R.UPDATE_AND_CREATE_TOPIC: "topic defaultTopic readQueueNums writeQueueNums perm topicFilterType topicSysFlag "
    "order attributes force",
    R.DELETE_TOPIC_IN_BROKER: "topic",
    R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: "",
    R.DELETE_SUBSCRIPTIONGROUP: "groupName removeOffset cleanOffset",
}
FIELDS: Final[Mapping[int, frozenset[str]]] = {
    int(code): COMMON.union(names.split()) for code, names in _FIELDS.items()
}
"""Every field that a request of a code may have."""


def decoded_fields(command: RemotingCommand) -> Mapping[str, str]:
    """The fields by name, of sends of version 2 the declared ones only."""
    fields = command.ext_fields
    if command.code not in LETTERED:
        return fields
    return {name: fields[letter] for letter, name in LETTERS.items() if letter in fields}


def encoded_fields(code: int, fields: Mapping[str, str]) -> dict[str, str]:
    """The opposite of ``decoded_fields``."""
    if code not in LETTERED:
        return dict(fields)
    return {letter: fields[name] for letter, name in LETTERS.items() if name in fields}


def undeclared(command: RemotingCommand) -> str | None:
    """A field that the request's code does not have; None: there is none, or no table of the code."""
    known = FIELDS.get(command.code)
    if known is None or command.ext_fields.keys() <= known:
        return None
    return min(command.ext_fields.keys() - known)
