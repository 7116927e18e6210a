"""DataFrames for jobs: partitions planned here and read by the data source's own reader, one Spark partition each.

Not the data source itself: Spark 4.2 keeps what a filter pruned with the source, for every use of a DataFrame, so that
a query that reads it twice with different filters gets wrong rows. Here nothing is pushed down; a time range is
part of the plan.
"""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pipeline.archive_plan import pinned_versions, plan
from pipeline.columns import Column, Cost, chosen, cost_of
from pipeline.partition_reader import read_in_worker
from pipeline.partitions import Slices
from pipeline.predicate import Predicate
from pipeline.source_options import Source, SourceOptions
from pipeline.spark_types import columns_of, schema_of
from pipeline.store_scan import LogRange, plan_ranges

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Part = Slices | LogRange
_EVERYTHING = Predicate()
_registered: WeakSet[SparkSession] = WeakSet()
"""Spark warns about every source that is registered twice."""
_PLAN = "secretPlan"
"""The option that holds the plan. It may hold keys: Spark shows no option with this in its name."""


def frame_of(spark: SparkSession, options: SourceOptions, predicate: Predicate = _EVERYTHING) -> DataFrame:
    """The messages that ``options`` mean and ``predicate`` admits, at the catalog versions of this moment."""
    columns = chosen(options.columns)
    parts: Sequence[Part]
    if options.source is Source.STORE:
        parts = plan_ranges(options)
    else:
        is_header_only = cost_of(columns) <= Cost.FOOTER
        parts = plan(options, pinned_versions(options), predicate, is_header_only=is_header_only)
    return frame_of_parts(spark, options, columns, parts, predicate)


def frame_of_parts(
    spark: SparkSession,
    options: SourceOptions,
    columns: list[Column],
    parts: Sequence[Part],
    predicate: Predicate = _EVERYTHING,
) -> DataFrame:
    """The rows of ``parts``."""
    if spark not in _registered:
        spark.dataSource.register(PlannedParts)
        _registered.add(spark)
    packed = base64.b64encode(zlib.compress(pickle.dumps((options, list(parts), predicate)), 1)).decode()
    return spark.read.format(PlannedParts.name()).schema(schema_of(columns)).option(_PLAN, packed).load()


class PlannedParts(DataSource):
    """Reads parts that the driver has planned. Offers no push-down."""

    @classmethod
    def name(cls) -> str:
        """Of use here only."""
        return "rocketmq-tiered-parts"

    def reader(self, schema: StructType) -> DataSourceReader:
        """For every action."""
        options, parts, predicate = pickle.loads(zlib.decompress(base64.b64decode(self.options[_PLAN])))
        return PartsReader(options, parts, predicate, schema)


class PartsReader(DataSourceReader):
    """One Spark partition for each part."""

    def __init__(
        self, options: SourceOptions, parts: list[Part], predicate: Predicate, schema: StructType
    ) -> None:
        self._options, self._predicate, self._schema = options, predicate, schema
        self._parts = parts

    def partitions(self) -> list[InputPartition]:
        """The parts travel with their tasks, not with the reader."""
        partitions: list[InputPartition] = [InputPartition(part) for part in self._parts]
        self._parts = []
        return partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a worker."""
        if partition.value is None:  # Spark's stand-in for "no partitions"
            return iter(())
        schema = to_arrow_schema(self._schema, timezone="UTC")
        columns = columns_of(self._schema)
        return read_in_worker(partition.value, self._options, self._predicate, columns, schema)
