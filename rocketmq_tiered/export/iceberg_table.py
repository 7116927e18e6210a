"""Batches of an export as snapshots of an Iceberg table: Parquet files that a commit of PyIceberg adds.

A commit also records the batch's number in the table, so that a batch is added once, whatever died between its commit
and the export's own record. The table is partitioned by topic and by the day of storeTime.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from pyiceberg.transforms import DayTransform
from sqlalchemy.exc import SQLAlchemyError

from rocketmq_tiered.export.export_job import PartsWriter
from rocketmq_tiered.export.export_plan import BatchPlan
from rocketmq_tiered.export.export_progress import Intent, PartDone
from rocketmq_tiered.export.iceberg_files import PLACE, STORE
from rocketmq_tiered.message_table.batches.message_batches import arrow_schema
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from tiered.errors import UnavailableError, UsageError
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import parse_url

BATCH = "tiered.batch"
"""Property of the table and of snapshots: the number of the last batch."""
FILES = "rocketmq_tiered.export.iceberg_files.StoreFiles"
TRIES = 8
"""Commits that other writers of the table may win in a row."""


def open_catalog(uri: str, target: str, store: ObjectStore) -> Catalog:
    """Open the Iceberg catalog at ``uri``: the address of a REST catalog, or a database as SQLAlchemy names it. If it
    is empty, the catalog is an SQLite file in the directory ``target``. ``store`` has the files of the tables at
    ``target``. Raises UsageError or UnavailableError if the catalog cannot be opened."""
    address = parse_url(target)
    if not uri:
        if address.scheme != "file":
            raise UsageError(
                f"{target} is not a local directory, in which the catalog could be a file",
                hint="give --catalog, such as sqlite:////path/catalog.db",
            )
        Path(address.place).mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{address.place}/catalog.db"
    is_rest = uri.startswith(("http://", "https://"))
    properties: dict[str, Any] = {"type": "rest" if is_rest else "sql", "uri": uri, "py-io-impl": FILES}
    properties |= {STORE: store, PLACE: target.rstrip("/")}
    if not is_rest:
        properties["warehouse"] = target
    shown = re.sub(r"//[^/]*@", "//…@", uri)
    logging.getLogger("pyiceberg").setLevel(logging.WARNING)  # at INFO it logs which file system it chooses
    try:
        return load_catalog("tiered", **properties)
    except (SQLAlchemyError, ValueError, ImportError, NotInstalledError) as error:
        raise UsageError(f"catalog {shown} cannot be opened: {_line(error).replace(uri, shown)}") from error
    except (OSError, RESTError) as error:
        raise UnavailableError(
            f"catalog {shown} does not answer: {_line(error).replace(uri, shown)}"
        ) from error


class IcebergWriter:
    """Writes batches of ``parts`` to the table ``name`` (namespace.table), which the first one creates."""

    def __init__(self, catalog: Catalog, name: str, parts: PartsWriter) -> None:
        self._catalog, self._name, self._parts = catalog, name, parts

    def __call__(self, intent: Intent, source: SourceOptions, plan: BatchPlan) -> list[PartDone]:
        """Write a batch as Parquet files and add them to the table in one snapshot. Raises UnavailableError if the
        catalog cannot be reached."""
        target = self._parts.target.rstrip("/")
        try:
            table = self._table(intent.choices.columns)
            done = self._parts(intent, source, plan)
            self._commit(table, intent.number, [f"{target}/{name}" for part in done for name in part.names])
        except (SQLAlchemyError, OSError, RESTError) as error:
            raise UnavailableError(
                f"the Iceberg catalog of table {self._name} cannot be used: {_line(error)}",
                hint="run the export again",
            ) from error
        return done

    def _table(self, columns: Sequence[str]) -> Table:
        """The table, which is created if it does not exist. Raises UsageError if it exists at another place than the
        one to which the files are written."""
        with suppress(NoSuchTableError):
            table = self._catalog.load_table(self._name)
            if (place := table.location().rstrip("/")) != self._parts.target.rstrip("/"):
                hint = f"export to {place}, or to a table of another --table"
                raise UsageError(
                    f"{self._name} is a table at {place}, not at {self._parts.target}", hint=hint
                )
            return table
        with suppress(NamespaceAlreadyExistsError):
            self._catalog.create_namespace(self._name.rpartition(".")[0])
        location = self._parts.target.rstrip("/")
        with suppress(TableAlreadyExistsError):  # another export has created it at this moment
            transaction = self._catalog.create_table_transaction(
                self._name, arrow_schema(chosen(columns)), location=location
            )
            with transaction, transaction.update_spec() as spec:
                spec.add_identity("topic")
                spec.add_field("storeTime", DayTransform(), "date")
        return self._catalog.load_table(self._name)

    def _commit(self, table: Table, batch: int, files: list[str]) -> None:
        """Add ``files`` to the table and note in its properties that it has ``batch``; do nothing if it has that
        already. Repeated if another writer changes the table at the same time."""
        for _ in range(TRIES):
            if int(table.properties.get(BATCH, 0)) >= batch:
                return
            try:
                with table.transaction() as transaction:
                    transaction.set_properties({BATCH: str(batch)})
                    if files:
                        transaction.add_files(files, {BATCH: str(batch)}, check_duplicate_files=False)
                return
            except CommitFailedException:
                table = self._catalog.load_table(self._name)
        raise UnavailableError(f"other writers keep changing {self._name}", hint="run the export again")


def _line(error: Any) -> str:
    return str(error).splitlines()[0]
