"""Spark over archives and broker stores: the data source ``rocketmq-tiered`` and jobs on top of it.

Never imported by the sidecar. Importing starts no session and loads no Spark.
"""

from pipeline.reading import read
from pipeline.session import register, session

__all__ = ["read", "register", "session"]
