"""Archive targets of benchmarks: a directory, or a MinIO server of its own. Each run gets an empty one.

Owns starting and stopping the server, counting requests by the server's metrics or by files, and listing stored
objects.
"""

import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import boto3
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "bench"
START_TIMEOUT_S = 30.0
OBJECT_CLASSES = ("data", "sets", "catalog", "pages", "state")
"""Parts of the archive's layout, as they stand in keys below ``<cluster>/<broker>/``."""
METRICS_PATH = "/minio/metrics/v3/api/requests"
METRICS_SETTLE_S = 1.2
"""The server caches its metrics for a second."""


@dataclass(frozen=True)
class StoredObjects:
    """What an archive holds: number and bytes of objects by class of key."""

    counts: dict[str, int]
    sizes: dict[str, int]

    @property
    def data_objects(self) -> int:
        """Objects with messages in them."""
        return self.counts.get("data", 0) + self.counts.get("sets", 0)

    @property
    def data_bytes(self) -> int:
        """Their bytes."""
        return self.sizes.get("data", 0) + self.sizes.get("sets", 0)

    @property
    def catalog_objects(self) -> int:
        """Commits and pages."""
        return self.counts.get("catalog", 0) + self.counts.get("pages", 0)


class ArchiveTarget(Protocol):
    """An empty target."""

    name: str

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def url(self) -> str:
        """ARCHIVE_URL."""
        ...

    @property
    def arguments(self) -> list[str]:
        """Flags that reach it."""
        ...

    @property
    def environment(self) -> dict[str, str]:
        """Credentials."""
        ...

    @property
    def server_pids(self) -> list[int]:
        """Processes that share the machine with the archiver on its behalf."""
        ...

    def requests(self) -> dict[str, int] | None:
        """Requests served since it was opened, by operation; None if they are not counted."""
        ...

    def stored(self) -> StoredObjects:
        """Objects stored now."""
        ...


def open_target(name: str, work: Path) -> ArchiveTarget:
    """``file`` or ``minio``."""
    directory = work / f"target-{name}"
    if name == FileTarget.name:
        return FileTarget(directory)
    if name == MinioTarget.name:
        return MinioTarget(directory)
    raise ValueError(f"no target {name!r}: file or minio")


class FileTarget:
    """A directory; gone after the run."""

    name = "file"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> Self:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def url(self) -> str:
        """file:// of the directory."""
        return f"file://{self._directory}"

    @property
    def arguments(self) -> list[str]:
        """None needed."""
        return []

    @property
    def environment(self) -> dict[str, str]:
        """None needed."""
        return {}

    @property
    def server_pids(self) -> list[int]:
        """No server."""
        return []

    def requests(self) -> dict[str, int] | None:
        """Requests are not counted; every successful PUT is a file."""
        return None

    def stored(self) -> StoredObjects:
        """Walks the directory."""
        found = [path for path in self._directory.rglob("*") if path.is_file()]
        return _by_class(
            [(path.relative_to(self._directory).as_posix(), path.stat().st_size) for path in found]
        )


class MinioTarget:
    """A MinIO server on a free port with one empty bucket; gone after the run."""

    name = "minio"
    _access_key, _secret_key = "bench-user", "bench-password"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._before: Counter[str] = Counter()

    def __enter__(self) -> Self:
        binary = find_minio()
        if binary is None:
            raise FileNotFoundError("no minio binary: set MINIO_BINARY, or put it on PATH")
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self._port = _free_port()
        settings = {
            "MINIO_ROOT_USER": self._access_key,
            "MINIO_ROOT_PASSWORD": self._secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_CI_CD": "1",
            "MINIO_PROMETHEUS_AUTH_TYPE": "public",
        }
        address = f"127.0.0.1:{self._port}"
        self._server = subprocess.Popen(
            [binary, "server", "--address", address, "--quiet", str(self._directory)],
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._await_ready()
        self._before = self._served()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(30)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def endpoint(self) -> str:
        """http:// address of the server."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """s3:// of the bucket and a prefix."""
        return f"s3://{BUCKET}/archive"

    @property
    def arguments(self) -> list[str]:
        """Endpoint and region."""
        return ["--endpoint-url", self.endpoint, "--region", "us-east-1"]

    @property
    def environment(self) -> dict[str, str]:
        """Credentials for the SDK's own chain."""
        return {"AWS_ACCESS_KEY_ID": self._access_key, "AWS_SECRET_ACCESS_KEY": self._secret_key}

    @property
    def server_pids(self) -> list[int]:
        """The server."""
        return [self._server.pid] if self._server is not None else []

    def requests(self) -> dict[str, int] | None:
        """As the server counted them."""
        return dict(self._served() - self._before)

    def stored(self) -> StoredObjects:
        """Lists the bucket."""
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return _by_class([(item["Key"], item["Size"]) for page in pages for item in page.get("Contents", [])])

    def _served(self) -> Counter[str]:
        time.sleep(METRICS_SETTLE_S)
        with urllib.request.urlopen(self.endpoint + METRICS_PATH, timeout=10) as answer:
            text = answer.read().decode("utf-8")
        found = re.findall(r'^minio_api_requests_total\{name="(\w+)",.*\} (\d+)$', text, re.MULTILINE)
        return Counter({name: int(count) for name, count in found})

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(BotoCoreError, ClientError):
                self._client().create_bucket(Bucket=BUCKET)
                return
            if time.monotonic() > deadline or self._server is None or self._server.poll() is not None:
                raise TimeoutError("MinIO does not start")
            time.sleep(0.1)

    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self._access_key,
            aws_secret_access_key=self._secret_key,
            region_name="us-east-1",
        )


def find_minio() -> str | None:
    """The binary: $MINIO_BINARY, the integration tests' cache, PATH, or where ``go install`` puts it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rocketmq-tiered"
    places = [os.environ.get("MINIO_BINARY", ""), *map(str, sorted(cache.glob("**/minio")))]
    places += [shutil.which("minio") or "", str(Path.home() / "go" / "bin" / "minio")]
    files = [place for place in places if place and Path(place).is_file()]
    return next((file for file in files if os.access(file, os.X_OK)), None)


def _by_class(found: list[tuple[str, int]]) -> StoredObjects:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for key, size in found:
        named = [part for part in key.split("/")[:-1] if part in OBJECT_CLASSES]
        name = named[0] if named else "other"
        counts[name] += 1
        sizes[name] += size
    return StoredObjects(dict(counts), dict(sizes))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
