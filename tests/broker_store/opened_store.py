"""What tests ask of an opened broker store."""

from tiered.broker_store.store import BrokerStore
from tiered.consume_queue.index import ConsumeQueueIndex


def consume_queues_of(store: BrokerStore) -> ConsumeQueueIndex:
    """Its consume queues, which can be read."""
    queues = store.consume_queues()
    assert queues is not None
    return queues
