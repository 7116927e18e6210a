"""Questions of an archive in an object store, and tables in one."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.spark.jobs.export import export
from tests.servers.certificates import Authority
from tests.servers.minio import start_minio
from tests.servers.running_store import REGION, RunningStore
from tests.spark.jobs.export_runs import NO_SPARK
from tests.spark.jobs.inline_tasks import InlineTasks
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import ObjectStoreSettings

pytestmark = pytest.mark.integration


def test_an_archive_and_its_tables_on_minio(
    run: Callable[..., tuple[int, str, str]],
    orders: str,
    minio_url: RunningStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = copied(orders, minio_url)
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


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    """A MinIO with a certificate that no system trusts."""
    directory = tmp_path_factory.mktemp("tls")
    authority, certificates = Authority(directory), directory / "certs"
    signed = authority.signed("minio")
    certificates.mkdir()
    signed.certificate.rename(certificates / "public.crt")
    signed.key.rename(certificates / "private.key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority.certificate))  # to ask whether it is ready
        running = start_minio(directory / "minio", certificates=certificates)
    yield replace(running, name=str(authority.certificate))
    running.server.stop()


ELSEWHERE = "http://store.invalid:9000"
CASES: dict[str, tuple[str, dict[str, str], str, str]] = {
    "endpoint of the environment": ("moto_url", {"AWS_ENDPOINT_URL_S3": "{endpoint}"}, "", ""),
    "endpoint of the profile": ("moto_url", {}, "endpoint_url = {endpoint}", ""),
    "endpoint of the settings": ("moto_url", {}, "", "{endpoint}"),
    "CA of the environment": ("tls", {"AWS_CA_BUNDLE": "{name}"}, "", "{endpoint}"),
    "CA of the profile": ("tls", {}, "ca_bundle = {name}", "{endpoint}"),
    "proxy of the environment": ("minio_url", {"HTTP_PROXY": "{endpoint}", "NO_PROXY": ""}, "", ELSEWHERE),
}
"""The server; what the environment, the profile and the settings (an endpoint) have. The profile has keys as well."""


@pytest.mark.parametrize("case", CASES)
def test_all_that_opens_a_store_takes_the_same_options(
    case: str,
    run: Callable[..., tuple[int, str, str]],
    orders: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, environment, profile, setting = CASES[case]
    server: RunningStore = request.getfixturevalue(kind)
    names = {"endpoint": server.endpoint, "name": server.name}
    with pytest.MonkeyPatch.context() as patch:
        if kind == "tls":
            patch.setenv("AWS_CA_BUNDLE", server.name)
        url, bucket = copied(orders, server), server.fresh_bucket()
    keys = (
        f"aws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\nregion={REGION}\n"
    )
    (tmp_path / "config").write_text(f"[profile own]\n{keys}{profile.format(**names)}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    environment = environment | {"AWS_PROFILE": "own", "AWS_CONFIG_FILE": f"{tmp_path}/config"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(**names))
    settings = ObjectStoreSettings(
        endpoint_url=setting.format(**names), server_side_encryption="AES256" if kind == "moto_url" else ""
    )
    flags = [
        f"--set=object_store.{name}={value}"
        for name, value in vars(settings).items()
        if isinstance(value, str) and value
    ]
    assert run("sql", url, *flags, "--csv", "SELECT count(text) AS n FROM orders") == (0, "n\n200\n", "")
    for form in ("parquet", "iceberg"):
        catalog = ("--catalog", f"sqlite:///{tmp_path}/catalog.db") if form == "iceberg" else ()
        code, out, err = run("export", url, f"{bucket}/{form}", "--format", form, *catalog, *flags)
        assert (code, " rows in " in out) == (0, True), err
    source = SourceOptions(url, store=StoreOptions(settings))
    assert export(NO_SPARK, source, f"{bucket}/spark", tasks=InlineTasks()).rows == 204
    if kind == "moto_url":
        with closing(server.client()) as client:
            name = bucket.removeprefix("s3://")
            found = [one["Key"] for one in client.list_objects_v2(Bucket=name)["Contents"]]
            assert {".parquet", ".json", ".avro"} <= {Path(key).suffix for key in found}
            heads = [client.head_object(Bucket=name, Key=key) for key in found]
            assert {head["ServerSideEncryption"] for head in heads} == {"AES256"}


def copied(orders: str, server: RunningStore) -> str:
    """The URL of a copy of an archive."""
    archives, url = Path(orders.removeprefix("file://")), f"{server.fresh_bucket()}/archives"
    with closing(open_store(url, server.options())) as store:
        for path in sorted(path for path in archives.rglob("*") if path.is_file()):
            store.put_if_absent(path.relative_to(archives).as_posix(), [path.read_bytes()])
    return url
