"""The real name servers, over one connection each for all clients, and their routes rewritten for clients of the proxy.

Reads go to the first that answers, changes to all of them, as from mqadmin. In a rewritten route our address is at id
0, the real master at id 1. Clients prefer id 0 and keep one address table per broker name, from the last route. So all
routes with our broker are rewritten alike, or none.

Sources: TopicRouteData, BrokerData, ClusterInfo (org.apache.rocketmq.remoting.protocol);
MQClientInstance.findBrokerAddressInSubscribe.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from rocketmq_tiered.server.listen.options import is_loopback
from rocketmq_tiered.server.proxy.proxy_handlers import REAL_BROKER_ID, SIDECAR_ID
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from rocketmq_tiered.server.security.addresses import host_of
from tiered.errors import UnavailableError
from tiered.formats import fastjson
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode
from tiered.remoting.tls import ClientTls

_NUMBERED_KEYS = frozenset({"brokerAddrs", "currIdMap"})
"""Java maps with numeric keys, which older name servers write without quotes."""


@dataclass(frozen=True)
class Published:
    """The broker name in routes, and the ``host:port`` that clients dial."""

    broker: str
    address: str


def may_dial(advertised: str, client_address: str) -> bool:
    """Whether a client at ``client_address`` can reach ``advertised``: a loopback address only from this machine."""
    return not is_loopback(host_of(advertised)) or is_loopback(host_of(client_address))


def published_addresses(addresses: dict[str, Any], sidecar: str) -> dict[str, Any]:
    """Return a broker's addresses by id with the sidecar's added as id 0 and every other one under an id higher by one.
    The table stays as it is if it has no other address; the sidecar's under another id (slave mode) is removed."""
    real = {int(number): address for number, address in addresses.items() if address != sidecar}
    if not real:
        return dict(addresses)
    shifted = {str(number + REAL_BROKER_ID): address for number, address in sorted(real.items())}
    return {str(SIDECAR_ID): sidecar, **shifted}


def published_broker(data: Any, published: Published) -> Any:
    """Return ``data``, RocketMQ's BrokerData of one broker, with the sidecar's address if it is that of the broker that
    the sidecar stands in front of. Other data stays as it is."""
    if not isinstance(data, dict) or data.get("brokerName") != published.broker:
        return data
    addresses = data.get("brokerAddrs")
    if not isinstance(addresses, dict):
        return data
    return {**data, "brokerAddrs": published_addresses(addresses, published.address)}


def published_route(route: dict[str, Any], published: Published) -> dict[str, Any]:
    """TopicRouteData (105) with our address for our broker."""
    brokers = route.get("brokerDatas")
    if not isinstance(brokers, list):
        return route
    return {**route, "brokerDatas": [published_broker(data, published) for data in brokers]}


def published_cluster(info: dict[str, Any], published: Published) -> dict[str, Any]:
    """Return ``info``, RocketMQ's ClusterInfo, with the sidecar's address for the broker that it stands in front of."""
    table = info.get("brokerAddrTable")
    if not isinstance(table, dict):
        return info
    return {
        **info,
        "brokerAddrTable": {name: published_broker(data, published) for name, data in table.items()},
    }


def rewritten(body: bytes, published: Published) -> bytes:
    """Return the body of a name server's reply about a route or the cluster with the sidecar's address in it, in the
    JSON dialect of the reply. Raises CorruptionError if the body does not parse."""
    document = fastjson.loads(body)
    if not isinstance(document, dict):
        return body
    document = published_cluster(published_route(document, published), published)
    return dialect_text(document, is_strict=_is_strict(body)).encode()


def _is_strict(body: bytes) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return True


def dialect_text(value: Any, *, is_strict: bool, parent: str = "") -> str:
    """Return ``value`` as JSON. Unless ``is_strict``, numeric keys of objects under the names _NUMBERED_KEYS are
    written without quotes, as fastjson writes Java's Map<Long, …>. ``parent``: the name that has ``value``."""
    if isinstance(value, dict):
        is_bare = not is_strict and parent in _NUMBERED_KEYS
        members = (
            f"{key if is_bare else json.dumps(key, ensure_ascii=False)}:"
            f"{dialect_text(member, is_strict=is_strict, parent=key)}"
            for key, member in value.items()
        )
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(dialect_text(item, is_strict=is_strict) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


WATCH_S = 10.0
TOTAL_S = 2.4
"""Time for all name servers together: clients close their connection after 3 s."""


class NameServers:
    """``addresses``: at least one, as host:port. ``tls`` None: plain connections."""

    def __init__(self, addresses: Sequence[str], gate: InflightLimit, tls: ClientTls | None = None) -> None:
        if not addresses:
            raise ValueError("no name servers")
        self._servers = [RemotingUpstream(address, gate, tls=tls) for address in addresses]
        self._limit_s = TOTAL_S / len(self._servers)
        self.problem = ""
        """Why none answered the last request; empty if one did."""

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """Send a request to one name server after the other until one answers, and return its reply. Raises
        UnavailableError, with the last failure, if none answers."""
        failure: UnavailableError | None = None
        for server in list(self._servers):
            try:
                answer = await server.call(command, self._limit_s)
            except UnavailableError as error:
                failure = error
                continue
            # It comes first from now on: an unavailable one costs time only once.
            self._servers.remove(server)
            self._servers.insert(0, server)
            self.problem = ""
            return answer
        assert failure is not None
        self.problem = str(failure)
        raise failure

    async def watch(self) -> None:
        """Ask every WATCH_S until cancelled, so that ``problem`` is known before a client needs a route."""
        while True:
            with suppress(UnavailableError):
                await self.ask(RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO, 0))
            await asyncio.sleep(WATCH_S)

    async def ask_all(self, command: RemotingCommand) -> RemotingCommand:
        """Send a change to all name servers, and return the last reply; the first that is an error ends it and is
        returned. Raises UnavailableError for a server that does not answer: those before it may have made the
        change."""
        answer: RemotingCommand | None = None
        for server in list(self._servers):
            answer = await server.call(command, self._limit_s)
            if answer.code != ResponseCode.SUCCESS:
                break
        assert answer is not None
        return answer

    def close(self) -> None:
        """Close the connections."""
        for server in self._servers:
            server.close("the service stops")
