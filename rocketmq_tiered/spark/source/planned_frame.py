"""DataFrames planned when they are created: one Spark partition for each part of the plan.

``read`` and the jobs use them. Batches reach Spark through ``mapInArrow``, which copies each value into a row once;
from a Python data source Spark copies it twice (docs/decisions/0016). Filters are not pushed down: Spark 4.2 applies
the filters pushed for one use of a DataFrame to all others. Offsets and times that a job selects are part of the plan.
"""

from __future__ import annotations

import pickle  # nosec B403
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from rocketmq_tiered.message_table.options.columns import Column, Cost
from rocketmq_tiered.message_table.options.source_options import Source, SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import Names, pinned_versions, plan
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.store_scan import LogRange, plan_ranges
from rocketmq_tiered.spark.source.spark_types import columns_of, schema_of
from rocketmq_tiered.spark.source.worker_memory import read_in_worker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Part = Slices | LogRange


def frame_of(
    spark: SparkSession, options: SourceOptions, versions: Mapping[Names, int] | None = None
) -> DataFrame:
    """The messages that ``options`` select, at the catalog ``versions`` (default: the newest now)."""
    columns = options.chosen_columns
    parts: list[tuple[SourceOptions, Part]] = []
    for one in options.each_path():
        if one.source is Source.STORE:
            parts += [(one, part) for part in plan_ranges(one)]
        else:
            is_header_only = options.cost_of(columns) <= Cost.FOOTER
            pinned = pinned_versions(one) if versions is None else versions
            parts += [(one, part) for part in plan(one, pinned, one.times, is_header_only=is_header_only)]
    return frame_of_parts(spark, columns, parts)


def frame_of_parts(
    spark: SparkSession, columns: list[Column], parts: Sequence[tuple[SourceOptions, Part]]
) -> DataFrame:
    """The rows of ``parts``, each with the options of its path."""
    schema = schema_of(columns)
    if not parts:
        return spark.createDataFrame([], schema)
    numbers = spark.range(0, len(parts), 1, len(parts))  # one per partition
    return numbers.mapInArrow(ReadParts(parts, schema), schema)


class ReadParts:
    """Reads parts by number. It is pickled with the plan and sent to the workers.

    Spark sends it to each executor once if it is larger than a megabyte. A worker unpickles it for every task: each
    part is compressed bytes, and a task unpacks its own. Credentials are not shown: Spark prints the class name.
    """

    def __init__(self, parts: Sequence[tuple[SourceOptions, Part]], schema: StructType) -> None:
        self._schema = schema
        self._parts = [zlib.compress(pickle.dumps(part), 1) for part in parts]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """In a worker. ``batches`` have one column with part numbers."""
        columns = columns_of(self._schema)
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        for batch in batches:
            for number in batch.column(0).to_pylist():
                # Parts come from the driver, with the code that runs here.
                options, part = pickle.loads(zlib.decompress(self._parts[number]))  # nosec B301
                yield from read_in_worker(part, options, options.times, columns, arrow)
