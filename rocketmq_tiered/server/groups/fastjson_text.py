"""Reply bodies that Java reads only in fastjson's dialect: maps whose keys are objects.

``{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:{…}}}``; all versions of fastjson 1.x and 2.x read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rocketmq_tiered.server.groups.queue_locks import MessageQueue


def queue_map(table: Mapping[MessageQueue, Any], others: Mapping[str, Any] | None = None) -> bytes:
    """An object with the map ``offsetTable`` keyed by queues, and ``others``."""
    entries = ",".join(f"{quoted(queue.document())}:{quoted(value)}" for queue, value in table.items())
    rest = "".join(f",{quoted(key)}:{quoted(value)}" for key, value in (others or {}).items())
    return f'{{"offsetTable":{{{entries}}}{rest}}}'.encode()


def offsets_for(language: str, table: Mapping[MessageQueue, int]) -> bytes:
    """Reset offsets for a client of ``language``: C++ clients read a list."""
    if language != "CPP":
        return queue_map(table)
    rows = [{**queue.document(), "offset": offset} for queue, offset in table.items()]
    return quoted({"offsetTable": rows}).encode()


def quoted(value: Any) -> str:
    """``value`` as JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
