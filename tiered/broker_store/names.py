"""Finds the names of broker and cluster: in broker.conf, else by topics named after them.

Pure. The names decide where the archive is, so an ambiguous name is an error. Sources:
org.apache.rocketmq.broker.topic.TopicConfigManager, org.apache.rocketmq.common.MixAll.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiered.broker_store.conf import BrokerConf
from tiered.errors import UsageError
from tiered.model.queue import SYSTEM_TOPICS

REPLY_SUFFIX: Final = "_REPLY_TOPIC"
SYNC_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"
_PERM_INHERIT: Final = 1


@dataclass(frozen=True)
class BrokerNames:
    """Names; empty if unknown."""

    cluster: str
    broker: str


def find_names(conf: BrokerConf | None, topics: Mapping[str, Mapping[str, Any]]) -> BrokerNames:
    """Names from ``conf``, else from the topic table; empty unless exactly one is found."""
    cluster = (conf.cluster if conf is not None else "") or _cluster(topics)
    broker = (conf.broker if conf is not None else "") or _broker(topics, cluster)
    return BrokerNames(cluster, broker)


def require_names(names: BrokerNames, store: str) -> BrokerNames:
    """``names`` if both are known. Raises UsageError with the missing flags."""
    missing = [name for name, value in (("cluster", names.cluster), ("broker", names.broker)) if not value]
    if missing:
        raise UsageError(
            f"the name of the {' and of the '.join(missing)} cannot be found in {store}",
            hint="give --broker-conf FILE, or " + " and ".join(f"--{name} NAME" for name in missing),
        )
    return names


def _cluster(topics: Mapping[str, Mapping[str, Any]]) -> str:
    found = [name.removesuffix(REPLY_SUFFIX) for name in topics if name.endswith(REPLY_SUFFIX)]
    # The broker also has a topic of the cluster's name; a user's topic may end like a reply topic.
    return _only([name for name in found if name in topics]) or _only(found)


def _broker(topics: Mapping[str, Mapping[str, Any]], cluster: str) -> str:
    members = [
        name.removeprefix(SYNC_MEMBER_PREFIX) for name in topics if name.startswith(SYNC_MEMBER_PREFIX)
    ]
    if members:
        return _only(members)
    # 4.9 has no such topic, but one of the broker's name: a single queue whose permissions others inherit.
    return _only(
        [
            name
            for name, config in topics.items()
            if name not in SYSTEM_TOPICS and name != cluster and _is_named_after_broker(config)
        ]
    )


def _is_named_after_broker(config: Mapping[str, Any]) -> bool:
    permission = config.get("perm", 0)
    one_queue = config.get("readQueueNums") == 1 and config.get("writeQueueNums") == 1
    return one_queue and isinstance(permission, int) and bool(permission & _PERM_INHERIT)


def _only(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ""
