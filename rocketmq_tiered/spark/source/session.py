"""Starts a Spark session with settings for the data source, and registers the data source with any session."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING
from weakref import WeakSet

from rocketmq_tiered.spark.source.data_source import RocketmqTieredSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILTER_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
WAREHOUSE = "spark.sql.warehouse.dir"
_DEFAULTS = {
    FILTER_PUSHDOWN: "true",
    "spark.sql.session.timeZone": "UTC",
}
_LOCAL_JAVA_OPTIONS = "-XX:+UseParallelGC -Darrow.enable_unsafe_memory_access=true"
"""Options of the JVM in local mode. Converting batches to rows takes a quarter less CPU time: without them Arrow checks
bounds and reference counts at every value, and G1 records every store."""

_registered: WeakSet[SparkSession] = WeakSet()
"""Spark warns about a source that is registered twice."""


def session(app_name: str, **conf: str) -> SparkSession:
    """A session with filter push-down enabled, UTC, and the data source registered.

    ``conf``: Spark settings (``**{"spark.driver.memory": "1g"}``) that take precedence. Without ``spark.master`` and
    outside spark-submit it runs in local mode with this Python, and its warehouse is a temporary directory. An existing
    session is reused.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    settings = _DEFAULTS | conf
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # not under spark-submit, which chooses the master
        settings = {"spark.master": "local[*]"} | settings
        if settings["spark.master"].startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            settings = {JAVA_OPTIONS: _LOCAL_JAVA_OPTIONS} | settings
            if WAREHOUSE not in settings and SparkContext._active_spark_context is None:
                settings[WAREHOUSE] = _temporary_warehouse()
    builder = SparkSession.builder.appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _temporary_warehouse() -> str:
    """A directory for managed tables: Spark creates one at once, by default in the working directory."""
    directory = tempfile.mkdtemp(prefix="spark-warehouse-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def register(spark: SparkSession) -> None:
    """Enable ``spark.read.format("rocketmq-tiered")`` in ``spark``."""
    if spark not in _registered:
        spark.dataSource.register(RocketmqTieredSource)
        _registered.add(spark)
