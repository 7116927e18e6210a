"""Facts that only the catalog has: the broker's tables are recovered from their newest readable copies; what cannot be
recovered is named, each with the next step."""

from collections.abc import Container, Iterator, Mapping

from tiered.catalog.broker_facts import TABLE_NAMES, broker_table
from tiered.catalog.state import CatalogState
from tiered.console import counted, names_text
from tiered.errors import ArchiveDamagedError
from tiered.formats.keys import STATE_PREFIX, TIMER_PREFIX, parse_state_key
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import QUEUE_HIDDEN
from tiered.object_store.interface import ObjectStore

TOPICS = TABLE_NAMES[0]
OUT_OF_CATALOG = (
    "minimum offsets by expiry: messages that had expired may be visible until they expire again",
    "reasons of gaps: tiered cat shows them as lost",
    "rules of topics and retention, and other settings: tiered run commits its own at its start",
    "it is not known whether the newest upload was complete: if the broker still has its log, tiered verify --full "
    "shows no gap at the end, else the messages after it are lost",
)


def newest_tables(
    store: ObjectStore, named: Mapping[str, str], unusable: Container[str], *, is_whole: bool
) -> dict[str, str]:
    """Key of the newest readable object of each of the broker's tables (topics, offsets, …) below `state/`. ``named``:
    those that the catalog names, which are the newest if it ``is_whole``; keys in ``unusable`` are garbage."""
    copies: dict[str, list[tuple[int, int, str]]] = {}
    for info in store.list(STATE_PREFIX):
        parts = parse_state_key(info.key)
        if parts is not None and info.key not in unusable and not (is_whole and parts[0] in named):
            copies.setdefault(parts[0], []).append((*parts[1:], info.key))
    newest = dict(named)
    for table, keys in copies.items():
        for _, _, key in sorted(keys, reverse=True):
            if key == named.get(table) or _is_readable(store, table, key):
                newest[table] = key
                break
    return newest


def _is_readable(store: ObjectStore, table: str, key: str) -> bool:
    try:
        broker_table(store, key, table)
    except ArchiveDamagedError:
        return False
    return True


def unknown_tables(state: CatalogState) -> Iterator[str]:
    """The broker's tables that nothing has."""
    for table in TABLE_NAMES:
        if table not in state.state_objects:
            yield (
                f"the broker's table {table} is not in the archive: tiered run beside the broker, or tiered backfill, "
                "archives it again"
            )


def unknown_without_root(store: ObjectStore, state: CatalogState) -> Iterator[str]:
    """Lines on what is unknown after a repair from data objects alone: facts that only the lost catalog had, each with
    what to do about it. ``state``: the repaired state."""
    yield from OUT_OF_CATALOG
    timers = sum(1 for _ in store.list(TIMER_PREFIX))
    if timers:
        yield (
            f"timers: {counted(timers, 'object')} with messages to be delivered later are kept in quarantine and not "
            "delivered; tiered republish sends messages of the gateway topic again"
        )
    deleted = not_in_table(store, state)
    if deleted:
        messages, topics = counted(sum(deleted.values()), "message"), names_text(sorted(deleted))
        yield (
            f"it is not known whether the broker has deleted {counted(len(deleted), 'topic')} with {messages}: "
            f"{topics}; the broker's newest archived table lacks them, and they are visible again; tiered expire "
            "--topic TOPIC --all erases one"
        )
    elif TOPICS not in state.state_objects:
        yield (
            "it is not known which topics the broker has deleted: they are visible again; tiered expire --topic TOPIC "
            "--all erases one"
        )


def not_in_table(store: ObjectStore, state: CatalogState) -> dict[str, int]:
    """Topics that readers see but the broker's newest archived table does not have, with their numbers of messages: the
    broker may have deleted them. Empty if no table of topics is archived."""
    key = state.state_objects.get(TOPICS)
    table = broker_table(store, key, TOPICS) if key else None
    messages: dict[str, int] = {}
    for queue, row in state.queues():
        is_known = table is None or queue.topic in table or queue.topic.startswith(LMQ_PREFIX)
        if not is_known and not row["flags"] & QUEUE_HIDDEN:
            messages[queue.topic] = messages.get(queue.topic, 0) + int(row["row_count"])
    return messages
