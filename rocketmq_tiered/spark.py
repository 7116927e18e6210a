"""Archives and broker stores in Spark: DataFrames, streams and jobs. docs/SPARK.md is the guide.

Needs ``pip install 'rocketmq-tiered[spark]'`` and Java 17.
"""

from pipeline.jobs.backfill import backfill
from pipeline.jobs.backfill_options import BackfillOptions, BackfillReport, StoreToBackfill
from pipeline.jobs.compact import ArchiveCompaction, compact
from pipeline.jobs.delta_table import delta_conf
from pipeline.jobs.diff import Difference, DifferenceKind, DiffReport, diff
from pipeline.jobs.export import ExportReport, export
from pipeline.jobs.search import Question, search
from pipeline.jobs.stats import Stats, stats
from pipeline.jobs.verify import ArchiveReport, verify
from pipeline.options.source_options import Mode, Source, SourceOptions
from pipeline.source.reading import read
from pipeline.source.session import register, session

__all__ = [
    "ArchiveCompaction", "ArchiveReport", "BackfillOptions", "BackfillReport", "DiffReport", "Difference",
    "DifferenceKind", "ExportReport", "Mode", "Question", "Source", "SourceOptions", "Stats",
    "StoreToBackfill", "backfill", "compact", "delta_conf", "diff", "export", "read", "register", "search",
    "session", "stats", "verify",
]  # fmt: skip
