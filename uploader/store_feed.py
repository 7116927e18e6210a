"""The feed and the header check of a broker store, as every writer and every preview of an archive uses them."""

from collections.abc import Mapping

from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.store import BrokerStore
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import SCHEDULE_TOPIC, TopicFilter
from uploader.bound_source import BoundSource
from uploader.header_check import HeaderCheck
from uploader.lmq_dispatch import LmqRules
from uploader.log_feed import LogFeed


def feed_of(
    store: BrokerStore, table: QueueTable, topic_filter: TopicFilter, bound_source: BoundSource
) -> LogFeed:
    """The reader of the store's commitlog, as every writer uses it: it skips damage up to the next record that
    ``bound_source`` finds, accepts records with a wrong checksum to which a consume queue refers, and uses the broker's
    delay levels, or RocketMQ's without a configuration. ``table`` numbers the queues of what is read."""
    conf = store.conf if store.conf is not None else BrokerConf()
    return LogFeed(
        store.commit_log,
        table,
        topic_filter,
        delay_levels_ms=conf.delay_levels_ms if topic_filter.admits(SCHEDULE_TOPIC) else None,
        next_record=bound_source.next_record,
        accepted_size=bound_source.accepted_size,
    )


def header_check_of(
    store: BrokerStore, table: QueueTable, bound_source: BoundSource | None = None
) -> HeaderCheck:
    """A check against the visible consume queues; those of a live RocksDB are not."""

    def rules() -> LmqRules:
        return lmq_rules(store, {} if bound_source is None else bound_source.config)

    return HeaderCheck(table, store.consume_queues, store.commit_log, lmq_rules=rules)


def lmq_rules(store: BrokerStore, reported: Mapping[str, str]) -> LmqRules:
    """How the broker of ``store`` adds messages to LMQs, by the configuration that it ``reported``, else by its
    broker.conf."""
    configuration = reported or (store.conf.properties if store.conf is not None else None)
    return LmqRules.of(configuration, in_rocksdb=store.has_rocksdb_lmqs)
