"""Batches of an export as snapshots of an Iceberg table: Parquet files that a commit of PyIceberg adds.

A commit also records the batch's number in the table, so that a batch is added once, whatever died between its commit
and the export's own record. The table is partitioned by topic and by the day of storeTime.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from pyiceberg.transforms import DayTransform
from sqlalchemy.exc import SQLAlchemyError

from rocketmq_tiered.export.export_job import PartsWriter
from rocketmq_tiered.export.export_plan import BatchPlan
from rocketmq_tiered.export.export_progress import Intent, PartDone
from rocketmq_tiered.message_table.batches.message_batches import arrow_schema
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from tiered.errors import UnavailableError, UsageError
from tiered.object_store.open_store import parse_url
from tiered.object_store.store_options import StoreOptions

BATCH = "tiered.batch"
"""Property of the table and of snapshots: the number of the last batch."""
TRIES = 8
"""Commits that other writers of the table may win in a row."""


def open_catalog(uri: str, target: str, store: StoreOptions) -> Catalog:
    """The catalog at ``uri``: http:// or https:// of a REST catalog, or a database as SQLAlchemy names it; empty: an
    SQLite file in the directory ``target``. Raises UsageError or UnavailableError if it cannot be opened."""
    address = parse_url(target)
    if not uri:
        if address.scheme != "file":
            raise UsageError(
                f"{target} is no directory for the catalog",
                hint="give --catalog, such as sqlite:////path/catalog.db",
            )
        Path(address.place).mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{address.place}/catalog.db"
    given, settings = store.credentials, store.settings
    is_rest = uri.startswith(("http://", "https://"))
    properties = {
        "type": "rest" if is_rest else "sql",
        "uri": uri,
        "warehouse": "" if is_rest else target,
        "s3.endpoint": settings.endpoint_url,
        "s3.region": settings.region,
        "s3.access-key-id": given.access_key if given else "",
        "s3.secret-access-key": given.secret_key if given else "",
    }
    logging.getLogger("pyiceberg").setLevel(logging.WARNING)  # it tells which file system it chooses
    try:
        return load_catalog("tiered", **{name: value for name, value in properties.items() if value})
    except (SQLAlchemyError, ValueError) as error:
        raise UsageError(f"catalog {uri} cannot be opened: {_line(error)}") from error
    except (OSError, RESTError) as error:
        raise UnavailableError(f"catalog {uri} does not answer: {_line(error)}") from error


class IcebergWriter:
    """Writes batches of ``parts`` to the table ``name`` (namespace.table), which the first one creates."""

    def __init__(self, catalog: Catalog, name: str, parts: PartsWriter) -> None:
        self._catalog, self._name, self._parts = catalog, name, parts

    def __call__(self, intent: Intent, source: SourceOptions, plan: BatchPlan) -> list[PartDone]:
        """See WriteBatch."""
        done = self._parts(intent, source, plan)
        target = self._parts.target.rstrip("/")
        names = [f"{target}/{name}" for part in done for name in part.names]
        try:
            self._commit(self._table(intent.choices.columns), intent.number, names)
        except (SQLAlchemyError, OSError, RESTError) as error:
            raise UnavailableError(
                f"catalog of {self._name}: {_line(error)}", hint="run the export again"
            ) from error
        return done

    def _table(self, columns: Sequence[str]) -> Table:
        try:
            return self._catalog.load_table(self._name)
        except NoSuchTableError:
            pass
        with suppress(NamespaceAlreadyExistsError):
            self._catalog.create_namespace(self._name.rpartition(".")[0])
        location = self._parts.target.rstrip("/")
        with suppress(TableAlreadyExistsError):  # another export made it
            transaction = self._catalog.create_table_transaction(
                self._name, arrow_schema(chosen(columns)), location=location
            )
            with transaction, transaction.update_spec() as spec:
                spec.add_identity("topic")
                spec.add_field("storeTime", DayTransform(), "date")
        return self._catalog.load_table(self._name)

    def _commit(self, table: Table, batch: int, files: list[str]) -> None:
        """Add ``files`` as ``batch``, unless the table has it."""
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
