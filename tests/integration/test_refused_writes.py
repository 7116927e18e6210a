"""A store that calls requests wrong: another region, a clock that is off. One line says what, nothing else changes.

`tiered backfill` and `tiered run` as processes, on MinIO.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from tests.archive.queue_reader import QueueReader, records_of
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.ground_truth import difference, load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER
from tests.servers.install import NotInstallableError
from tests.servers.minio import start_minio
from tests.servers.proxy import Action, FaultProxy, ProxiedRequest
from tests.servers.running_store import RunningStore
from tiered.archive.segment_reader import SegmentCache
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.create_race import TRIAL_PREFIX
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NAME = "F"
TIERED = (sys.executable, "-m", "rocketmq_tiered.cli")
SKEWED = (sys.executable, "-m", "tests.integration.skewed_clock")
NAMES = ("--cluster", CLUSTER, "--broker", BROKER)
SETTINGS = {
    "TIERED_ADMIN__PORT": "0",
    "TIERED_OFFLOAD__BATCH_BYTES": str(512 << 10),
    "TIERED_OFFLOAD__SPLIT_BYTES": str(128 << 10),
}
PASSED_PUTS = 12
HOME = "eu-west-3"


class Later:
    """Passes PASSED_PUTS PUTs of the archive, then does ``action`` to every request: the clock jumps, or the bucket
    moves, midway."""

    def __init__(self, action: Action) -> None:
        self._action = action
        self._puts = 0

    def __call__(self, request: ProxiedRequest) -> Action:
        self._puts += request.method == "PUT" and f"/{TRIAL_PREFIX}" not in request.path
        return self._action if self._puts > PASSED_PUTS else Action.PASS


def execute(
    command: tuple[str, ...], *arguments: str, server: RunningStore, region: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end."""
    regions = {"AWS_DEFAULT_REGION": region} if region else {}
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, **server.environment(), **SETTINGS, **regions},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong."""
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("tiered: ")]
    return line


def archived_part(server: RunningStore, url: str, directory: Path) -> dict[tuple[str, int], int]:
    """Messages of each queue that are visible, each compared with the truth, in order and without a hole."""
    archive = PrefixedStore(open_store(url, server.options()), archive_prefix(CLUSTER, BROKER))
    state, segments = load(archive), SegmentCache(archive)
    truth = load_truth(directory, NAME, FILTER)
    log = CommitLog([directory / "store" / "commitlog"])
    found = {}
    for key in state.visible_queues():
        if key.topic in truth.compaction_topics:
            continue
        lines = truth.queues[key[:2]]
        records = list(records_of(QueueReader(archive, state, key, segments=segments)))
        for (offset, _, record), line in zip(records, lines, strict=False):
            assert (offset, difference(record, line, log)) == (line["queueOffset"], ""), key
        found[key[:2]] = len(records)
    return found


def check_refused_midway(
    action: Action, words: tuple[str, ...], directory: Path, url: str, server: RunningStore
) -> dict[tuple[str, int], int]:
    """A backfill that is refused from some moment on: exit code 2, one line, and what was committed stays true."""
    with FaultProxy(server.endpoint, Later(action)) as proxy:
        done = execute(
            TIERED,
            "backfill",
            str(directory / "store"),
            url,
            *NAMES,
            server=replace(server, endpoint=proxy.endpoint),
        )
        refused = [one for one in proxy.requests if one.action is action]
    assert done.returncode == 2, done.stderr
    for word in (*words, url):
        assert word in complaint(done)
    assert len(refused) < 12, "what repeating cannot help is not repeated"
    part = archived_part(server, url, directory)
    assert 0 < sum(part.values()) < load_truth(directory, NAME, FILTER).messages
    return part


def check_finished(directory: Path, url: str, server: RunningStore, *, region: str = "") -> None:
    """The same command where nothing refuses: everything is there."""
    done = execute(TIERED, "backfill", str(directory / "store"), url, *NAMES, server=server, region=region)
    assert done.returncode == 0, done.stderr
    assert check_against_truth(open_store(url, server.options()), directory, NAME) > 10_000


def test_a_clock_that_is_off(
    real_store: Callable[[str], Path], tmp_path: Path, minio_url: RunningStore
) -> None:
    directory = real_store(NAME)
    url = f"{minio_url.fresh_bucket()}/skewed"
    part = check_refused_midway(Action.SKEWED, ("RequestTimeTooSkewed", "clock"), directory, url, minio_url)
    # Now the server itself looks at the clock.
    done = execute(SKEWED, "backfill", str(directory / "store"), url, *NAMES, server=minio_url)
    assert done.returncode == 2, done.stderr
    assert "RequestTimeTooSkewed" in complaint(done) and "set this machine's clock" in complaint(done)
    check_run_refused(SKEWED, ("RequestTimeTooSkewed", "clock"), directory, url, minio_url, tmp_path)
    assert archived_part(minio_url, url, directory) == part, "nothing was changed"
    check_finished(directory, url, minio_url)


def check_run_refused(
    command: tuple[str, ...],
    words: tuple[str, ...],
    directory: Path,
    url: str,
    server: RunningStore,
    state: Path,
) -> None:
    """`tiered run` ends with code 2 and one error line that says it all."""
    shutil.rmtree(state / "state", ignore_errors=True)
    done = execute(
        command,
        "run",
        "--store",
        str(directory / "store"),
        "--url",
        url,
        "--state-dir",
        str(state / "state"),
        *NAMES,
        server=server,
    )
    assert done.returncode == 2, done.stderr
    lines = [orjson.loads(line) for line in done.stderr.splitlines()]
    (failed,) = [line for line in lines if line["level"] in ("error", "critical")]
    for word in words:
        assert word in failed["cause"]


def test_a_region_that_is_wrong(
    real_store: Callable[[str], Path], tmp_path: Path, minio_url: RunningStore
) -> None:
    """The server says no more than that it is wrong."""
    directory = real_store(NAME)
    url = f"{minio_url.fresh_bucket()}/region"
    part = check_refused_midway(
        Action.WRONG_REGION,
        ("AuthorizationHeaderMalformed", "object_store.region"),
        directory,
        url,
        minio_url,
    )
    with FaultProxy(minio_url.endpoint, lambda _request: Action.WRONG_REGION) as proxy:
        elsewhere = replace(minio_url, endpoint=proxy.endpoint)
        check_run_refused(
            TIERED, ("AuthorizationHeaderMalformed", "region"), directory, url, elsewhere, tmp_path
        )
    assert archived_part(minio_url, url, directory) == part, "nothing was changed"
    check_finished(directory, url, minio_url)


@pytest.fixture(scope="module")
def regional_minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    try:
        running = start_minio(tmp_path_factory.mktemp("minio-region"), region=HOME)
    except NotInstallableError as error:
        pytest.skip(f"MinIO is not available: {error}")
    yield running
    running.server.stop()


def test_a_server_that_names_its_region_is_followed_there(
    real_store: Callable[[str], Path], regional_minio: RunningStore
) -> None:
    client = regional_minio.client(HOME)
    client.create_bucket(Bucket="regional", CreateBucketConfiguration={"LocationConstraint": HOME})
    client.close()
    check_finished(real_store(NAME), "s3://regional/archive", regional_minio, region="us-west-2")
