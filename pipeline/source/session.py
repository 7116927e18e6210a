"""Starts a Spark session that suits the data source, and registers the data source with any session.

Owns the settings a session needs. Does not own the data source (data_source.py).
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING
from weakref import WeakSet

from pipeline.source.data_source import RocketmqTieredSource

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
"""Of a JVM that drives and reads at once. Turning batches into rows takes a quarter less CPU time: Arrow otherwise
checks bounds and reference counts at every value, and G1 records every store."""

_registered: WeakSet[SparkSession] = WeakSet()
"""Spark warns about every source that is registered twice."""


def session(app_name: str, **conf: str) -> SparkSession:
    """A session with filter push-down on, UTC, and the data source registered.

    ``conf`` are Spark settings (``**{"spark.driver.memory": "1g"}``) and win. Without ``spark.master``, and not under
    spark-submit, it runs in this machine's processes, with this Python, and its warehouse is a directory that goes with
    the process. A session that exists already is used.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    settings = _DEFAULTS | conf
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has said where
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
    """Where Spark puts managed tables: it makes the directory at once, in the working directory unless told."""
    directory = tempfile.mkdtemp(prefix="spark-warehouse-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def register(spark: SparkSession) -> None:
    """Make ``spark.read.format("rocketmq-tiered")`` known to ``spark``."""
    if spark not in _registered:
        spark.dataSource.register(RocketmqTieredSource)
        _registered.add(spark)
