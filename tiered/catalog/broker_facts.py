"""Facts of the broker, recorded by the archive's owner for a restored store: sizes of files, and its version. Pure."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tiered.catalog.holdings import REPAIR_HINT
from tiered.catalog.json_fields import fields, row
from tiered.catalog.state import CatalogState
from tiered.errors import ArchiveDamagedError, CorruptionError, NotFoundError
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state
from tiered.object_store.interface import ObjectStore

TABLE_NAMES: Final = (
    "topics",
    "subscription_groups",
    "consumer_offsets",
    "delay_offsets",
    "topic_queue_mappings",
)
"""The broker's tables, by their names below `state/`."""
BROKER: Final = "broker"
"""The archive-wide setting that holds these facts."""


class BrokerFacts(NamedTuple):
    """Sizes of a commitlog file and of a file of a consume queue; 0 and an empty ``version``: unknown."""

    commitlog_file_bytes: int = 0
    consume_queue_file_bytes: int = 0
    version: str = ""


def recorded_facts(state: CatalogState) -> BrokerFacts:
    """The broker's file sizes and version, as the archive's settings have them. Raises CorruptionError."""
    try:
        recorded = fields(state.settings.get(BROKER, {}))
        return row(BrokerFacts, [recorded.get(*item) for item in BrokerFacts._field_defaults.items()])
    except (TypeError, ValueError) as error:
        raise CorruptionError(
            f"catalog version {state.version} is damaged: its setting {BROKER!r} is invalid: {error!r}"
        ) from error


def facts_to_record(state: CatalogState, found: BrokerFacts) -> Mapping[str, Any]:
    """The settings by which the next commit records the facts ``found``, of which unknown ones do not replace those
    that ``state`` has; empty if nothing changes."""
    before = recorded_facts(state)
    known_facts: dict[str, Any] = {name: value for name, value in found._asdict().items() if value}
    after = before._replace(**known_facts)
    return {} if after == before else {BROKER: after._asdict()}


def broker_table(store: ObjectStore, key: str, name: str) -> Any:
    """The broker's table ``name``, which the catalog has as the object ``key``. Raises ArchiveDamagedError if it cannot
    be read."""
    try:
        return decode_state(store.get(key, stored_bytes_max()), name, source=f"{store.url}/{key}")
    except (CorruptionError, NotFoundError) as error:
        raise ArchiveDamagedError(
            f"the archived table {name!r} of the broker cannot be read: {error.message}", hint=REPAIR_HINT
        ) from error
