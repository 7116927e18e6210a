"""Archives as tables of other tools: Parquet files and Iceberg tables, in batches that have every message once.

Needs pyarrow, and PyIceberg for Iceberg: ``pip install 'rocketmq-tiered[sql]'``.
"""

from typing import TYPE_CHECKING

from tiered.lazy_names import lazy_names

if TYPE_CHECKING:
    from rocketmq_tiered.export.export_job import ExportJob, PartsWriter
    from rocketmq_tiered.export.export_progress import ExportProgress
    from rocketmq_tiered.export.iceberg_table import IcebergWriter, open_catalog
    from rocketmq_tiered.export.parquet_parts import readable_as_umask, write_part

__all__ = [
    "ExportJob",
    "ExportProgress",
    "IcebergWriter",
    "PartsWriter",
    "open_catalog",
    "readable_as_umask",
    "write_part",
]

_HOMES = {
    "rocketmq_tiered.export.export_job": ("ExportJob", "PartsWriter"),
    "rocketmq_tiered.export.export_progress": ("ExportProgress",),
    "rocketmq_tiered.export.iceberg_table": ("IcebergWriter", "open_catalog"),
    "rocketmq_tiered.export.parquet_parts": ("readable_as_umask", "write_part"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
