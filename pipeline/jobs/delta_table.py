"""A Delta table that batches are appended to, each once, in a directory or in an S3 bucket.

Owns which libraries a session needs for it, how Hadoop's file system reaches a bucket as our own object store does, and
the transaction. Does not own what is appended (export.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.errors import UsageError
from tiered.object_store.open_store import StoreAddress, parse_url
from tiered.object_store.store_options import StoreOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""Delta for the Spark that is pinned here, as `spark.jars.packages` takes it."""
S3_PACKAGES = (
    "org.apache.hadoop:hadoop-aws:3.5.0",
    *(
        f"software.amazon.awssdk:{module}:2.35.4"
        for module in ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
    ),
)
"""Hadoop's S3 file system, of the Hadoop that is in this Spark, and what it uses of the AWS SDK: 18 MB."""
_NOT_NEEDED = (
    "software.amazon.awssdk:bundle",  # all services of AWS, half a gigabyte
    "org.apache.hadoop:hadoop-client-api",  # Spark's own
    "org.apache.hadoop:hadoop-client-runtime",
)
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_SDK_CHAIN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_GIVEN_KEYS = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_GIVEN_SESSION = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_APPLICATION = "rocketmq-tiered-export"
"""The application whose transactions a table's batches are: a table belongs to one export."""


@dataclass(frozen=True)
class Appended:
    """What a transaction wrote, as Delta's history has it."""

    rows: int
    files: int
    size_bytes: int


def delta_conf(target: str) -> dict[str, str]:
    """What a session needs to write a Delta table at ``target``. Raises UsageError for what can hold none."""
    packages = (DELTA_PACKAGE, *(S3_PACKAGES if table_address(target).scheme == "s3" else ()))
    return {
        "spark.jars.packages": ",".join(packages),
        "spark.jars.excludes": ",".join(_NOT_NEEDED),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


def table_address(target: str) -> StoreAddress:
    """Where a table of either format is written. Raises UsageError for what can hold none."""
    address = parse_url(target)
    if address.scheme not in ("file", "s3"):
        raise UsageError(f"{target} can hold no table", hint="use file:///directory or s3://bucket/prefix")
    return address


class DeltaTable:
    """The table at ``target``. Raises UsageError when the session lacks what is needed."""

    def __init__(self, spark: SparkSession, target: str, options: StoreOptions) -> None:
        address = table_address(target)
        self._spark = spark
        self._path = address.place
        if address.scheme == "s3":
            self._path = "s3a://" + "/".join(filter(None, (address.place, address.prefix)))
            _reach(spark, address.place, options)

    def append(self, rows: DataFrame, number: int, said: str) -> Appended:
        """One transaction, number ``number``: made already, it writes nothing. ``said`` is kept with it."""
        (
            rows.write.format("delta")
            .mode("append")
            .partitionBy("topic", "date")
            .option("txnAppId", _APPLICATION)
            .option("txnVersion", number)
            .option("userMetadata", said)
            .save(self._path)
        )
        history = self._spark.sql(f"DESCRIBE HISTORY delta.`{self._path}`")
        entry: Any = history.where(history.userMetadata == said).first()
        metrics = {} if entry is None else entry["operationMetrics"]
        names = ("numOutputRows", "numFiles", "numOutputBytes")
        return Appended(*(int(metrics.get(name, 0)) for name in names))


def _reach(spark: SparkSession, bucket: str, options: StoreOptions) -> None:
    """Tell Hadoop of this bucket what our own object store is told."""
    if not hasattr(spark, "_jsc"):
        raise UsageError(
            "a Delta table on s3:// needs a classic session", hint="Spark Connect has no settings of Hadoop"
        )
    conf: Any = spark._jsc.hadoopConfiguration()
    try:
        conf.getClassByName(_S3A)
    except Exception as error:
        raise UsageError(
            f"Spark has no {_S3A}, so no Delta table on s3://",
            hint="settings of pipeline.jobs.delta_table.delta_conf(target) for a session of your own",
        ) from error
    for name, value in s3a_settings(options).items():
        conf.set(f"fs.s3a.bucket.{bucket}.{name}", value)


def s3a_settings(options: StoreOptions) -> dict[str, str]:
    """Of one bucket, without their prefix."""
    settings, keys = options.settings, options.credentials
    is_path_style = settings.addressing_style == "path" or (
        settings.addressing_style == "auto" and bool(settings.endpoint_url)
    )
    found = {"path.style.access": str(is_path_style).lower(), "aws.credentials.provider": _SDK_CHAIN}
    if settings.endpoint_url:
        found["endpoint"] = settings.endpoint_url
    if settings.region:
        found["endpoint.region"] = settings.region
    if keys is not None:
        found |= {"access.key": keys.access_key, "secret.key": keys.secret_key}
        found["aws.credentials.provider"] = _GIVEN_SESSION if keys.session_token else _GIVEN_KEYS
        if keys.session_token:
            found["session.token"] = keys.session_token
    return found
