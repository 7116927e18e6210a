"""Starts a Spark session that suits the data source, and registers the data source with any session.

Owns the settings a session needs. Does not own the data source (data_source.py).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING
from weakref import WeakSet

from pipeline.data_source import RocketmqTieredSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILTER_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_DEFAULTS = {
    FILTER_PUSHDOWN: "true",
    "spark.sql.session.timeZone": "UTC",
}


_registered: WeakSet[SparkSession] = WeakSet()
"""Spark warns about every source that is registered twice."""


def session(app_name: str, **conf: str) -> SparkSession:
    """A session with filter push-down on, UTC, and the data source registered.

    ``conf`` are Spark settings (``**{"spark.driver.memory": "1g"}``) and win. Without ``spark.master``, and not under
    spark-submit, it runs in this machine's processes, with this Python. A session that exists already is used.
    """
    from pyspark.sql import SparkSession

    settings = _DEFAULTS | conf
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has said where
        settings = {"spark.master": "local[*]"} | settings
        if settings["spark.master"].startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make ``spark.read.format("rocketmq-tiered")`` known to ``spark``."""
    if spark not in _registered:
        spark.dataSource.register(RocketmqTieredSource)
        _registered.add(spark)
