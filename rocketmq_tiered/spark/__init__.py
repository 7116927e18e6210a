"""Archives and broker stores in Spark: DataFrames, streams and jobs. docs/SPARK.md is the guide.

Needs ``pip install 'rocketmq-tiered[spark]'`` and Java 17.
"""

from typing import TYPE_CHECKING

from tiered.lazy_names import lazy_names

if TYPE_CHECKING:
    from rocketmq_tiered.export.export_job import ExportReport
    from rocketmq_tiered.message_table.options.source_options import Mode, Source, SourceOptions
    from rocketmq_tiered.spark.jobs.backfill import BackfillOptions, BackfillReport, StoreToBackfill, backfill
    from rocketmq_tiered.spark.jobs.compact import ArchiveCompaction, compact, compact_keys
    from rocketmq_tiered.spark.jobs.export import delta_conf, export
    from rocketmq_tiered.spark.jobs.verify import ArchiveReport, verify
    from rocketmq_tiered.spark.source.reading import read, with_json
    from rocketmq_tiered.spark.source.session import register, session

__all__ = [
    "ArchiveCompaction",
    "ArchiveReport",
    "BackfillOptions",
    "BackfillReport",
    "ExportReport",
    "Mode",
    "Source",
    "SourceOptions",
    "StoreToBackfill",
    "backfill",
    "compact",
    "compact_keys",
    "delta_conf",
    "export",
    "read",
    "register",
    "session",
    "verify",
    "with_json",
]

_HOMES = {
    "rocketmq_tiered.spark.jobs.backfill": (
        "BackfillOptions",
        "BackfillReport",
        "StoreToBackfill",
        "backfill",
    ),
    "rocketmq_tiered.spark.jobs.compact": ("ArchiveCompaction", "compact", "compact_keys"),
    "rocketmq_tiered.export.export_job": ("ExportReport",),
    "rocketmq_tiered.spark.jobs.export": ("delta_conf", "export"),
    "rocketmq_tiered.spark.jobs.verify": ("ArchiveReport", "verify"),
    "rocketmq_tiered.message_table.options.source_options": ("Mode", "Source", "SourceOptions"),
    "rocketmq_tiered.spark.source.reading": ("read", "with_json"),
    "rocketmq_tiered.spark.source.session": ("register", "session"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
