"""A REST catalog of Iceberg tables in memory, with the requests that PyIceberg makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata


class _Handler(BaseHTTPRequestHandler):
    tables: dict[str, TableMetadata]
    requests: list[str]

    def _answer(self, code: int, document: Any = None) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _table(self, metadata: TableMetadata) -> dict[str, Any]:
        return {
            "metadata-location": "memory",
            "metadata": json.loads(metadata.model_dump_json()),
            "config": {},
        }

    def do_GET(self) -> None:
        self.requests.append(f"GET {self.path}")
        if self.path.startswith("/v1/config"):
            return self._answer(200, {"defaults": {}, "overrides": {}})
        name = self.path.rpartition("/")[2].partition("?")[0]
        if name in self.tables:
            return self._answer(200, self._table(self.tables[name]))
        return self._answer(404, {"error": {"message": "none", "type": "NoSuchTableException", "code": 404}})

    def do_HEAD(self) -> None:
        self._answer(204 if self.path.rpartition("/")[2] in self.tables else 404)

    def do_POST(self) -> None:
        self.requests.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/namespaces":
            return self._answer(200, {"namespace": json.loads(body)["namespace"], "properties": {}})
        if self.path.endswith("/tables"):
            wanted = CreateTableRequest.model_validate_json(body)
            made = new_table_metadata(
                wanted.table_schema,
                wanted.partition_spec or UNPARTITIONED_PARTITION_SPEC,
                wanted.write_order or UNSORTED_SORT_ORDER,
                wanted.location or "",
                wanted.properties,
            )
            if not wanted.stage_create:
                self.tables[wanted.name] = made
            return self._answer(200, self._table(made))
        name = self.path.rpartition("/")[2]
        commit = CommitTableRequest.model_validate_json(body)
        base = self.tables.get(name)
        for requirement in commit.requirements:
            requirement.validate(base)
        before = base or MetastoreCatalog._empty_table_metadata()
        self.tables[name] = update_table_metadata(before, commit.updates, enforce_validation=base is None)
        return self._answer(200, self._table(self.tables[name]))

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def rest_catalog() -> Iterator[tuple[str, list[str]]]:
    """(URI of a running catalog, the requests it has had)."""
    requests: list[str] = []
    handler = type("Handler", (_Handler,), {"tables": {}, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
