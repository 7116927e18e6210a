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


@pytest.mark.parametrize("place_of_endpoint", ["environment", "profile", "setting"])
def test_exports_go_where_the_archive_is_and_are_encrypted_as_set(
    place_of_endpoint: str,
    run: Callable[..., tuple[int, str, str]],
    orders: str,
    moto_url: RunningStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    keys = f"aws_access_key_id=k\naws_secret_access_key=s\nregion={REGION}\n"
    endpoint = "" if place_of_endpoint != "profile" else f"endpoint_url={moto_url.endpoint}\n"
    (tmp_path / "config").write_text(f"[profile own]\n{keys}{endpoint}")
    monkeypatch.setenv("AWS_PROFILE", "own")
    given = ["--set", "object_store.server_side_encryption=AES256"]
    if place_of_endpoint == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto_url.endpoint)
    elif place_of_endpoint == "setting":
        given += ["--endpoint-url", moto_url.endpoint]
    bucket = moto_url.fresh_bucket()
    for form in ("parquet", "iceberg"):
        catalog = ("--catalog", f"sqlite:///{tmp_path}/catalog.db") if form == "iceberg" else ()
        code, out, err = run("export", orders, f"{bucket}/{form}", "--format", form, *catalog, *given)
        assert (code, " rows in " in out) == (0, True), err
    with closing(moto_url.client()) as client:
        name = bucket.removeprefix("s3://")
        found = [one["Key"] for one in client.list_objects_v2(Bucket=name)["Contents"]]
        assert {".parquet", ".json", ".avro"} <= {Path(key).suffix for key in found}
        assert {client.head_object(Bucket=name, Key=key)["ServerSideEncryption"] for key in found} == {
            "AES256"
        }
