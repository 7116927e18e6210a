"""Queues as a table, in segment footers, commits and pages: each topic name once, then numbers."""

from tiered.formats.container import Container
from tiered.model.queue_roster import QueueRoster, QueueSelection
from tiered.model.tables import QUEUE_DTYPE


def queues_of(container: Container) -> QueueSelection:
    """The queues of a commit, root page, page or footer: its table ``queues`` has the number of each topic in the
    header's list ``topics``. Raises KeyError, TypeError or ValueError if these are damaged."""
    container.charge_queues()
    topics, table = container.header["topics"], container.table("queues", QUEUE_DTYPE)
    if len(table) and int(table["topic"].max()) >= len(topics):
        raise ValueError(f"the queue table refers to topic {table['topic'].max()} of only {len(topics)}")
    if not isinstance(topics, list) or not set(map(type, topics)) <= {str}:
        raise TypeError("the names of topics are not a list of texts")
    return QueueRoster.of(topics, table).first(len(table))
