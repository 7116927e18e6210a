"""Questions of an archive in an object store, and tables in one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

from tests.servers.running_store import REGION, RunningStore
from tiered.object_store.open_store import open_store

pytestmark = pytest.mark.integration


def test_an_archive_and_its_tables_on_minio(
    run: Callable[..., tuple[int, str, str]],
    orders: str,
    minio_url: RunningStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archives, url = Path(orders.removeprefix("file://")), f"{minio_url.fresh_bucket()}/archives"
    with closing(open_store(url, minio_url.options())) as store:
        for path in sorted(path for path in archives.rglob("*") if path.is_file()):
            store.put_if_absent(path.relative_to(archives).as_posix(), [path.read_bytes()])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", minio_url.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", minio_url.secret_key)
    given = ("--endpoint-url", minio_url.endpoint, "--region", REGION)
    question = "SELECT count(*) AS n, min(keys) AS k FROM orders WHERE queue_id = 1"
    assert run("sql", url, *given, "--csv", question) == (0, "n,k\n100,k1\n", "")
    bucket, catalog = minio_url.fresh_bucket(), f"sqlite:///{tmp_path}/catalog.db"
    code, _, err = run("export", url, f"{bucket}/lake", *given, "--format", "iceberg")
    assert (code, "give --catalog" in err) == (2, True)
    for target, form in (("lake", ("--format", "iceberg", "--catalog", catalog)), ("files", ())):
        assert run("export", url, f"{bucket}/{target}", *given, *form, "--json")[0] == 0
        code, out, _ = run("export", url, f"{bucket}/{target}", *given, *form)
        assert (code, out) == (0, f"{bucket}/{target}: no new messages\n")
    access = {"s3.endpoint": minio_url.endpoint, "s3.region": REGION}
    table = load_catalog("tiered", type="sql", uri=catalog, **access).load_table("rocketmq.messages")
    assert table.scan(row_filter="topic == 'orders'").to_arrow().num_rows == 200
