"""The stand-alone recipe of docs/SPARK.md on a real master and worker: executors get the packed project and options."""

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.running_store import REGION, RunningStore
from tests.servers.spark_cluster import BARE, SPARK_HOME, Cluster, packed_environment, running_cluster
from tiered.object_store.open_store import open_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
RealStore = Callable[[str], Path]
Finished = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def keys(minio_url: RunningStore) -> dict[str, str]:
    """What the environment of every machine says about the object store."""
    return {"AWS_ACCESS_KEY_ID": minio_url.access_key, "AWS_SECRET_ACCESS_KEY": minio_url.secret_key}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), keys) as found:
        yield found


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of who submits: ``job.tar.gz``, and the same unpacked as ``job``."""
    directory = tmp_path_factory.mktemp("client")
    with tarfile.open(packed_environment(directory)) as packed:
        packed.extractall(directory / "job", filter="fully_trusted")
    return directory


def submit(client: Path, cluster: Cluster, keys: dict[str, str], *arguments: object) -> Finished:
    """As docs/SPARK.md has it."""
    (main,) = (client / "job").glob("lib/python3*/site-packages/rocketmq_tiered/spark/__main__.py")
    command = [
        str(SPARK_HOME / "bin" / "spark-submit"),
        "--master",
        cluster.url,
        "--archives",
        "job.tar.gz#job",
        "--executor-memory",
        "512m",
        "--conf",
        "spark.sql.shuffle.partitions=2",
        "--conf",
        "spark.ui.enabled=false",
        "--conf",
        "spark.driver.host=127.0.0.1",
        "--conf",
        f"spark.local.dir={client / 'local'}",
        str(main),
        *map(str, arguments),
    ]
    environment = BARE | keys | {"PYSPARK_PYTHON": "./job/bin/python", "HOME": str(client)}
    return subprocess.run(
        command, cwd=client, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def sources_of(executor: Path) -> list[Path]:
    """Where an executor found the project: in what it was sent."""
    return list(
        executor.glob(
            "job/lib/python3*/site-packages/rocketmq_tiered/message_table/batches/message_batches.py"
        )
    )


def test_the_recipe_runs_a_job_on_executors_that_have_nothing_of_the_project(
    cluster: Cluster,
    client: Path,
    keys: dict[str, str],
    minio_url: RunningStore,
    small_archive: Path,
) -> None:
    bucket = minio_url.fresh_bucket()
    store = open_store(f"{bucket}/archives", minio_url.options())
    for path in sorted(path for path in small_archive.rglob("*") if path.is_file()):
        store.put_if_absent(path.relative_to(small_archive).as_posix(), [path.read_bytes()])
    store.close()

    child = submit(
        client,
        cluster,
        keys,
        "verify",
        f"{bucket}/archives",
        "--json",
        "--endpoint-url",
        minio_url.endpoint,
        "--region",
        REGION,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    (report,) = json.loads(child.stdout[child.stdout.index("[") :])
    assert (report["ok"], report["counts"]["messages"] > 5000) == (True, True)
    executors = cluster.executors()
    assert executors
    assert any(sources_of(executor) for executor in executors)
    assert not any(minio_url.secret_key in text for text in _texts(child, executors))


def test_executors_write_a_table_s_files(
    cluster: Cluster, client: Path, keys: dict[str, str], small_archive: Path, tmp_path: Path
) -> None:
    child = submit(
        client, cluster, keys, "export", f"file://{small_archive}", f"file://{tmp_path / 'table'}", "--json"
    )
    assert child.returncode == 0, child.stderr[-3000:]
    report = json.loads(child.stdout[child.stdout.index("{") :])
    assert len(list((tmp_path / "table").rglob("*.parquet"))) == report["files"] > 0
    assert report["rows"] > 5000
    assert any(sources_of(executor) for executor in cluster.executors())


def _texts(child: Finished, executors: list[Path]) -> Iterator[str]:
    yield from (child.stdout, child.stderr)
    for executor in executors:
        yield from ((executor / name).read_text("utf-8", "replace") for name in ("stdout", "stderr"))
