"""A stand-alone Spark cluster on this machine, from the PySpark distribution: one master, one worker with two cores.

The worker knows nothing of this project: it starts in a directory of its own with a bare environment, and what its
executors run is what a job brings along.
"""

import re
import shutil
import sysconfig
import tarfile
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from tests.servers.child import ChildServer

ROOT = Path(__file__).parents[2]
PACKAGES = ("tiered", "uploader", "fetcher", "rocketmq_tiered")
SPARK_HOME = Path(pyspark.__file__).parent
BARE = {"PATH": "/usr/local/bin:/usr/bin:/bin", "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1"}
"""The whole environment of a machine of the cluster."""
_MASTER_URL = re.compile(r"Starting Spark master at (spark://\S+)")


@dataclass(frozen=True)
class Cluster:
    """``work`` holds a directory for each executor: what it was sent, and its log."""

    url: str
    work: Path

    def executors(self) -> list[Path]:
        """Directories of the executors there were."""
        return sorted(path.parent for path in self.work.glob("app-*/*/stderr"))


@contextmanager
def running_cluster(directory: Path, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """A cluster below ``directory``; ``environment`` is what its worker's machine knows besides."""
    log, work = directory / "master.log", directory / "work"
    master = _daemon(log, ["master.Master", "--port", "0"], BARE, lambda text: bool(_MASTER_URL.search(text)))
    with master:
        found = _MASTER_URL.search(log.read_text())
        assert found is not None
        worker = _daemon(
            directory / "worker.log",
            [
                "worker.Worker",
                "--port",
                "0",
                "--cores",
                "2",
                "--memory",
                "1g",
                "--work-dir",
                str(work),
                found[1],
            ],
            BARE | environment,
            lambda text: "Successfully registered with master" in text,
        )
        with worker:
            yield Cluster(found[1], work)


def _daemon(
    log: Path, arguments: list[str], environment: Mapping[str, str], is_ready: Callable[[str], bool]
) -> ChildServer:
    name, *rest = arguments
    command = [
        "env",
        "-i",
        *(f"{key}={value}" for key, value in environment.items()),
        str(SPARK_HOME / "bin" / "spark-class"),
        f"org.apache.spark.deploy.{name}",
        "--host",
        "127.0.0.1",
        "--webui-port",
        "0",
        *rest,
    ]
    return ChildServer(name, command, {}, log, lambda: is_ready(log.read_text("utf-8", "replace")))


def packed_environment(directory: Path) -> Path:
    """``job.tar.gz`` as venv-pack makes it: a Python with the project, to be unpacked anywhere on this machine.

    What the project depends on is linked from the environment of the tests, whose own link to the sources is not
    followed: without the archive the project cannot be imported.
    """
    job = directory / "packing"
    venv.create(job, with_pip=False, symlinks=True)
    (packages,) = job.glob("lib/python3*/site-packages")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    packed = directory / "job.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=1) as out:
        for path in sorted(job.iterdir()):
            out.add(path, path.name)
    shutil.rmtree(job)
    return packed
