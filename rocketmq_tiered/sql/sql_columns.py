"""Columns of a topic in SQL: those of the message table in snake_case, and ``json``. Imports no DuckDB."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from rocketmq_tiered.message_table.batches.arrow_schema import arrow_schema
from rocketmq_tiered.message_table.options.columns import COLUMNS
from tiered.errors import UsageError

_SHOWN = (
    "queueId", "queueOffset", "storeTime", "bornTime", "tags", "keys", "uniqKey", "properties", "text", "body", "topic",
    "generation", "brokerName", "cluster", "storeSize", "commitLogOffset", "storeTimestamp", "bornTimestamp",
    "bornHost", "storeHost", "sysFlag", "flag", "reconsumeTimes", "ptOffset", "offsetMsgId", "tagsCode", "innerNum",
)  # fmt: skip
JSON = "json"
"""The text as a JSON value; null where it is none."""


def snake_case(name: str) -> str:
    """``queueOffset`` -> ``queue_offset``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


TABLE_NAMES = {snake_case(name): name for name in _SHOWN}
"""Name in SQL -> name in the message table, but ``json``."""
SCHEMA = pa.schema([
    *(field.with_name(snake_case(field.name)) for field in arrow_schema([COLUMNS[name] for name in _SHOWN])),
    pa.field(JSON, pa.json_()),
])  # fmt: skip


def checked(names: Sequence[str] | None) -> list[str]:
    """The named columns in this order; all without names. Raises UsageError for an unknown or repeated one."""
    chosen = list(SCHEMA.names if names is None else names)
    for number, name in enumerate(chosen):
        if name not in SCHEMA.names:
            raise UsageError(f"no column {name}", hint=f"columns: {', '.join(SCHEMA.names)}")
        if name in chosen[:number]:
            raise UsageError(f"column {name} is named twice")
    return chosen
