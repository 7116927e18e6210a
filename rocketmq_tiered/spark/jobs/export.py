"""Exports an archive as Parquet files or a Delta table, partitioned by topic and day, with Spark's tasks.

The steps are those of every export (rocketmq_tiered/export/export_job.py). A Delta batch is one transaction with the
batch's number, which Delta accepts once. Readers that list Parquet files see a batch grow; Delta readers see it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from rocketmq_tiered.export.export_job import (
    DELTA,
    PARQUET,
    ExportJob,
    ExportReport,
    PartsWriter,
    WriteBatch,
)
from rocketmq_tiered.export.export_plan import BatchPlan
from rocketmq_tiered.export.export_progress import ExportProgress, Intent, PartDone
from rocketmq_tiered.export.parquet_parts import DAY_MS, FIRST_DAY, LAST_DAY, readable_as_umask, write_part
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.spark.jobs.tasks import SparkTasks
from rocketmq_tiered.spark.source.reading import frame_of_parts
from tiered.errors import UsageError
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import StoreAddress, open_store, parse_url
from tiered.object_store.s3_client import ca_bundle, configured, proxy_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""Delta for the pinned Spark, in the form of `spark.jars.packages`."""
S3_PACKAGES = (
    "org.apache.hadoop:hadoop-aws:3.5.0",
    *(
        f"software.amazon.awssdk:{module}:2.35.4"
        for module in ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
    ),
)
"""Hadoop's S3 file system in the version of this Spark, and the modules of the AWS SDK that it needs: 18 MB."""
_NOT_NEEDED = (
    "software.amazon.awssdk:bundle",  # all AWS services, half a gigabyte
    "org.apache.hadoop:hadoop-client-api",  # part of Spark
    "org.apache.hadoop:hadoop-client-runtime",
)
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_SDK_CHAIN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_GIVEN_KEYS = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_GIVEN_SESSION = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_APPLICATION = "rocketmq-tiered-export"
"""txnAppId of the transactions. A table belongs to one export."""


def delta_conf(target: str) -> dict[str, str]:
    """Spark settings for writing a Delta table at ``target``. Raises UsageError for an unsupported scheme."""
    packages = (DELTA_PACKAGE, *(S3_PACKAGES if table_address(target).scheme == "s3" else ()))
    return {
        "spark.jars.packages": ",".join(packages),
        "spark.jars.excludes": ",".join(_NOT_NEEDED),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


def table_address(target: str) -> StoreAddress:
    """The address of a table of either format. Raises UsageError for an unsupported scheme."""
    address = parse_url(target)
    if address.scheme not in ("file", "s3"):
        raise UsageError(
            f"tables cannot be written to {target}", hint="use file:///directory or s3://bucket/prefix"
        )
    return address


class DeltaTable:
    """The table at ``target``. Raises UsageError if the session lacks a library."""

    def __init__(self, spark: SparkSession, target: str, options: StoreOptions) -> None:
        """Finds the path for Hadoop, and configures its S3 client for a target on s3://."""
        address = table_address(target)
        self._spark = spark
        self._path = address.place
        self._umask = {"owner": "077", "group": "027", "all": "022"}[options.settings.file_readers]
        if address.scheme == "s3":
            self._path = "s3a://" + "/".join(filter(None, (address.place, address.prefix)))
            _configure_bucket(spark, address.place, options)

    def append(self, rows: DataFrame, number: int, metadata: str) -> PartDone:
        """Append ``rows`` to the table in the transaction ``number``, with ``metadata`` in its history. Delta writes
        nothing if that transaction was committed before, and fails if another export commits it at the same time.
        Returns rows, files and bytes, as the history has them."""
        before = 0
        try:
            (
                rows.write.format("delta")
                .mode("append")
                .partitionBy("topic", "date")
                .option("txnAppId", _APPLICATION)
                .option("txnVersion", number)
                .option("userMetadata", metadata)
                .option("fs.permissions.umask-mode", self._umask)
                .save(self._path)
            )
        except Exception:
            before = self._written(metadata)[0]
            if not before:
                raise
        return PartDone(*self._written(metadata), rows_before=before)

    def _written(self, metadata: str) -> tuple[int, int, int]:
        """Rows, files and bytes of the transaction with ``metadata``; 0 if the table does not have it."""
        from pyspark.errors import AnalysisException

        names = ("numOutputRows", "numFiles", "numOutputBytes")
        with suppress(AnalysisException):  # there is no table yet
            history = self._spark.sql(f"DESCRIBE HISTORY delta.`{self._path}`")
            for entry in history.where(history.userMetadata == metadata).collect():
                rows, files, size_bytes = (int(entry["operationMetrics"].get(name, 0)) for name in names)
                return rows, files, size_bytes
        return 0, 0, 0


def _configure_bucket(spark: SparkSession, bucket: str, options: StoreOptions) -> None:
    """Give Hadoop's S3 client, which writes Delta tables, the settings of our object store for ``bucket``. Raises
    UsageError if the session has no such client, or a setting is in force that it does not know."""
    if not hasattr(spark, "_jsc"):
        raise UsageError(
            "a Delta table on s3:// cannot be written by Spark Connect, which gives no access to Hadoop's settings",
            hint="use a classic Spark session, or export Parquet files",
        )
    conf: Any = spark._jsc.hadoopConfiguration()
    try:
        conf.getClassByName(_S3A)
    except Exception as error:
        raise UsageError(
            f"a Delta table on s3:// requires {_S3A}, which this session lacks",
            hint="start the session with the settings of rocketmq_tiered.spark.delta_conf(target)",
        ) from error
    for name, value in {
        "the SDK's ca_bundle (AWS_CA_BUNDLE)": ca_bundle(),
        "object_store.upload_bytes_per_s": options.settings.upload_bytes_per_s,
    }.items():
        if value:
            raise UsageError(
                f"a Delta table on s3:// is written by Hadoop's S3 client, to which {name} does not apply",
                hint="unset it (add a certificate to Java's trust store instead), or export Parquet files",
            )
    for name, value in s3a_settings(configured(options)).items():
        conf.set(f"fs.s3a.bucket.{bucket}.{name}", value)


def s3a_settings(options: StoreOptions) -> dict[str, str]:
    """Hadoop's settings for one bucket that say the same as ``options`` for our object store, by their names without
    the prefix ``fs.s3a.bucket.BUCKET``."""
    settings, keys = options.settings, options.credentials
    is_path_style = settings.addressing_style == "path" or (
        settings.addressing_style == "auto" and bool(settings.endpoint_url)
    )
    hadoop = {"path.style.access": str(is_path_style).lower(), "aws.credentials.provider": _SDK_CHAIN}
    if settings.endpoint_url:
        hadoop["endpoint"] = settings.endpoint_url
    if settings.region:
        hadoop["endpoint.region"] = settings.region
    if settings.server_side_encryption:
        hadoop["encryption.algorithm"] = {"AES256": "SSE-S3", "aws:kms": "SSE-KMS"}[
            settings.server_side_encryption
        ]
    if settings.kms_key:
        hadoop["encryption.key"] = settings.kms_key
    if proxy := proxy_of(settings.endpoint_url or "https://s3.amazonaws.com"):
        split = urlsplit(proxy)
        given = {
            "host": split.hostname,
            "port": split.port,
            "username": split.username,
            "password": split.password,
        }
        hadoop |= {f"proxy.{name}": str(value) for name, value in given.items() if value}
    if keys is not None:
        hadoop |= {"access.key": keys.access_key, "secret.key": keys.secret_key}
        hadoop["aws.credentials.provider"] = _GIVEN_SESSION if keys.session_token else _GIVEN_KEYS
        if keys.session_token:
            hadoop["session.token"] = keys.session_token
    return hadoop


FORMATS = (PARQUET, DELTA)


def export(
    spark: SparkSession,
    source: SourceOptions,
    target: str,
    *,
    format: str = PARQUET,
    store: StoreOptions | None = None,
    tasks: SparkTasks | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Export the messages of ``source`` that are not in ``target`` (file:///directory or s3://bucket/prefix) yet.

    ``source`` selects topics, columns and generations; columns and generations cannot change after the first call.
    ``store`` opens the target (default: options of the source). ``report(parts done, total)``. Raises UsageError if the
    target was started with other choices or has messages that a replaced log does not have, and what reading and
    writing raise.
    """
    if format not in FORMATS:
        raise UsageError(
            f"an archive cannot be exported as {format}", hint=f"choose the format {' or '.join(FORMATS)}"
        )
    table_address(target)
    store_options = readable_as_umask(store or source.store)
    with closing(open_store(target, store_options)) as target_store:
        write: WriteBatch
        if format == DELTA:
            write = _DeltaWriter(spark, target, store_options)
        else:
            runner = tasks or SparkTasks(spark)
            write = PartsWriter(
                target,
                store_options,
                lambda todo: runner.run(write_part, todo, "export"),
                runner.parallelism,
                report,
            )
        return ExportJob(source, target, format, ExportProgress(target_store), write).run()


class _DeltaWriter:
    """Writes a batch as transaction ``intent.number``, which writes nothing if it was committed before."""

    def __init__(self, spark: SparkSession, target: str, store: StoreOptions) -> None:
        self._spark, self._target, self._store = spark, target, store

    def __call__(self, intent: Intent, source: SourceOptions, plan: BatchPlan) -> list[PartDone]:
        """Append a batch to the Delta table by one transaction."""
        table = DeltaTable(self._spark, self._target, self._store)
        rows = batch_frame(self._spark, source, intent.choices.columns, plan.parts)
        metadata = orjson.dumps({"batch": intent.number, "archives": intent.archives}).decode()
        return [table.append(rows, intent.number, metadata)]


def batch_frame(
    spark: SparkSession, source: SourceOptions, names: Sequence[str], parts: list[Slices]
) -> DataFrame:
    """The messages of ``parts`` of an archive, one Spark partition each, with the columns ``names`` and a column
    ``date``, the day of the store timestamp, by which tables are partitioned. Days outside [FIRST_DAY, LAST_DAY], from
    damaged timestamps, become the nearest of these."""
    from pyspark.sql import functions

    columns = chosen(tuple(dict.fromkeys((*names, "topic", "storeTimestamp"))))
    frame = frame_of_parts(spark, columns, [(source, part) for part in parts])
    stamp = f"greatest(least(storeTimestamp, {LAST_DAY * DAY_MS}L), {FIRST_DAY * DAY_MS}L)"
    day = f"CAST(({stamp} - pmod({stamp}, {DAY_MS}L)) DIV {DAY_MS}L AS INT)"  # DIV rounds towards 1970
    frame = frame.withColumn("date", functions.expr(f"date_from_unix_date({day})"))
    return frame if "storeTimestamp" in names else frame.drop("storeTimestamp")
