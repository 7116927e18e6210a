"""Where messages are sent: the master brokers behind an address, their topics and queues.

Sources: DefaultRequestProcessor of the name server, TopicConfig, PermName.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered.errors import NotFoundError, UnavailableError, UsageError
from tiered.model.address import host_and_port
from tiered.remoting.client import BrokerClient, document_of, is_refusal
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

PERM_WRITE = 2
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024

Connect = Callable[[str], BrokerClient]


@dataclass(frozen=True)
class TargetBroker:
    """A master broker. ``topics``: name -> its configuration, without topics that the broker may not write."""

    cluster: str
    name: str
    address: str
    max_body_bytes: int = _MAX_MESSAGE_BYTES
    topics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    may_write: bool = True

    def queue_count(self, topic: str) -> int:
        """Queues of ``topic`` that take messages."""
        found = self.topics.get(topic) or {}
        can_write = self.may_write and int(found.get("perm", 0)) & PERM_WRITE
        return int(found.get("writeQueueNums", 0)) if can_write else 0


@dataclass(frozen=True)
class TargetQueue:
    """One queue of a topic at a broker."""

    broker: TargetBroker
    queue_id: int


@dataclass(frozen=True)
class Target:
    """``brokers`` by name: one, or all of a name server. ``name``: cluster and broker, or the clusters: what stays when
    addresses change, or brokers come and go."""

    name: str
    brokers: tuple[TargetBroker, ...]

    def queues(self, topic: str, wanted_count: int) -> list[TargetQueue]:
        """Return the queues of ``topic`` that take messages, by broker name and queue id. If there are none, raises
        NotFoundError or UsageError with the mqadmin command that creates the topic with ``wanted_count`` queues, or
        makes it writable."""
        queues = [
            TargetQueue(broker, queue_id)
            for broker in self.brokers
            for queue_id in range(broker.queue_count(topic))
        ]
        if queues:
            return queues
        where = f"-b {self.brokers[0].address}" if len(self.brokers) == 1 else "-c CLUSTER"
        create = f"mqadmin updateTopic {where} -t {topic} -r {wanted_count} -w {wanted_count}"
        if not any(topic in broker.topics for broker in self.brokers):
            raise NotFoundError(f"topic {topic} does not exist at {self.name}", hint=f"create it: {create}")
        raise UsageError(
            f"topic {topic} at {self.name} is not writable", hint=f"make it writable: {create} -p 6"
        )


def find_target(address: str, connect: Connect) -> Target:
    """Return the broker at ``address``, or all master brokers that the name server at ``address`` lists. Raises
    UsageError for an address that is none, and UnavailableError if a server does not answer as it should."""
    if host_and_port(address) is None:
        raise UsageError(
            f"--to {address} is not an address",
            hint="give host:port of a broker or name server, such as 127.0.0.1:9876",
        )
    client = connect(address)
    try:
        # Brokers refuse this request of name servers. The other way round would not do: name servers of 4.9 leave
        # requests that they do not know without an answer.
        answer = client.call(RequestCode.GET_BROKER_CLUSTER_INFO)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            broker = _broker(client, address, client.call(RequestCode.GET_ALL_TOPIC_CONFIG))
            return Target(f"{broker.cluster}/{broker.name}", (broker,))
        addresses = _masters(answer)
    finally:
        client.close()
    if not addresses:
        raise UnavailableError(
            f"name server {address} lists no master broker",
            hint="run the command again once a master is registered there",
        )
    brokers = tuple(_connected(addresses[name], connect) for name in sorted(addresses))
    return Target(", ".join(sorted({broker.cluster for broker in brokers})), brokers)


def _connected(address: str, connect: Connect) -> TargetBroker:
    client = connect(address)
    try:
        return _broker(client, address, client.call(RequestCode.GET_ALL_TOPIC_CONFIG))
    finally:
        client.close()


def _broker(client: BrokerClient, address: str, topics: RemotingCommand) -> TargetBroker:
    """Return the broker at ``address``, as its own configuration and its topic table describe it. ``topics``: its
    answer to a request for that table. Raises UnavailableError if the broker did not give out one of both."""
    config = client.broker_config() or {}
    if topics.code != ResponseCode.SUCCESS or "brokerName" not in config:
        hint = "set broker.credentials_file to an account of that broker" if is_refusal(topics) else ""
        raise UnavailableError(
            f"broker {address} does not return its topics and configuration: {topics.remark or topics.code}",
            hint=hint,
        )
    return TargetBroker(
        config.get("brokerClusterName", ""),
        config["brokerName"],
        address,
        int(config.get("maxMessageSize") or _MAX_MESSAGE_BYTES),
        document_of(topics).get("topicConfigTable") or {},
        bool(int(config.get("brokerPermission") or PERM_WRITE) & PERM_WRITE),
    )


def _masters(answer: RemotingCommand) -> dict[str, str]:
    """Return the master's address of each broker by name, from a name server's answer: in its list, id 0 is the master.
    Raises UnavailableError if the name server refused to answer."""
    if answer.code != ResponseCode.SUCCESS:
        raise UnavailableError(f"the name server does not list its brokers: {answer.remark or answer.code}")
    table = document_of(answer).get("brokerAddrTable") or {}
    return {
        str(name): str(data["brokerAddrs"]["0"])
        for name, data in table.items()
        if "0" in (data.get("brokerAddrs") or {})
    }
