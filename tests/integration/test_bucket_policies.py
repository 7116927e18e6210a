"""The policies of deploy/s3 on MinIO: exactly what their commands need. What is missing is named in one line.

Spark's part is in tests/spark/test_minio.py. MinIO speaks TLS, so that the denial of plain HTTP stays.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from tests.deploy.bucket_policies import ROLES, Policy, allowed_actions, for_minio, policy_of, without
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.servers.certificates import Authority
from tests.servers.child import ChildServer
from tests.servers.install import NotInstallableError
from tests.servers.minio import start_minio
from tests.servers.running_store import RunningStore
from tests.servers.tiered_serve import tiered_serve
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.clock import Clock
from tiered.errors import AccessDeniedError, AlreadyExistsError
from tiered.formats.keys import archive_prefix, catalog_key, data_key
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectRange, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Run = Callable[..., tuple[int, str, str]]
Use = Callable[[dict[str, str]], None]
PREFIX = "some/prefix"
ARCHIVE = archive_prefix(CLUSTER, BROKER)
NAMES = ("--cluster", CLUSTER, "--broker", BROKER)
TOPIC, GROUP = "t_k_four", "g_policies"
MESSAGES = 18_004
TIERED = (sys.executable, "-m", "rocketmq_tiered.cli")


@dataclass
class Bucket:
    """A bucket for archives of store F below PREFIX. Without ``certificate`` its server speaks plain HTTP."""

    server: RunningStore
    name: str
    store: Path
    certificate: Path | None
    archives: int = 0
    """With small objects."""
    _orphans: int = field(default=0)

    @property
    def url(self) -> str:
        """Where the archive is."""
        return f"s3://{self.name}/{PREFIX}"

    def policy(self, role: str) -> Policy:
        """The policy of a role as this server takes it."""
        return for_minio(policy_of(role, self.name, PREFIX), has_tls=self.certificate is not None)

    def account(self, policy: Policy) -> dict[str, str]:
        """The environment of a process that may do what ``policy`` says."""
        keys = self.server.account(policy)
        return self.server.environment() | {
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
            "AWS_SESSION_TOKEN": str(keys.session_token),
        }

    def archive(self, policy: Policy) -> PrefixedStore:
        """The archive's objects as an account with ``policy`` sees them."""
        settings = self.server.options(
            multipart_threshold_bytes=5 << 20, multipart_part_bytes=5 << 20
        ).settings
        return PrefixedStore(
            open_store(self.url, StoreOptions(settings, self.server.account(policy))), ARCHIVE
        )

    def add_garbage(self) -> str:
        """An object that a commit has made pending: its key."""
        self._orphans += 1
        key = data_key(QueueKey("orphan", 0, 0), self._orphans, epoch=1, attempt=900)
        store = PrefixedStore(open_store(self.url, self.server.options()), ARCHIVE)
        store.put_if_absent(key, [b"garbage"])
        writer = CatalogWriter(
            store,
            cluster=CLUSTER,
            broker=BROKER,
            instance="test",
            kind="maintenance",
            clock=Clock(),
        )
        writer.maintain(
            lambda _state: CommitDraft(CommitKind.MAINTENANCE, pending_deletions=(key,), created_ms=1)
        )
        store.close()
        return key


@contextmanager
def running_minio(directory: Path, certificates: Path | None) -> Iterator[RunningStore]:
    """A MinIO of one's own."""
    try:
        running = start_minio(directory, certificates=certificates)
    except NotInstallableError as error:
        pytest.skip(f"MinIO is not available: {error}")
    try:
        yield running
    finally:
        running.server.stop()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, real_store: Callable[[str], Path]) -> Iterator[Bucket]:
    """On a MinIO that speaks TLS."""
    directory = tmp_path_factory.mktemp("policies")
    authority = Authority(directory / "ca")
    signed = authority.signed("minio")
    certificates = directory / "certs"
    certificates.mkdir()
    shutil.copy(signed.certificate, certificates / "public.crt")
    shutil.copy(signed.key, certificates / "private.key")
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_CA_BUNDLE", str(authority.certificate))
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # For the test's own question whether MinIO is ready.
    patch.setenv("SSL_CERT_FILE", str(authority.certificate))
    try:
        with running_minio(directory / "minio", certificates) as server:
            store = real_store("F") / "store"
            yield Bucket(server, server.fresh_bucket().removeprefix("s3://"), store, authority.certificate)
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def archived(bucket: Bucket) -> Bucket:
    """With the archive, made by the writer's account."""
    done = subprocess.run(
        [*TIERED, "backfill", str(bucket.store), bucket.url, *NAMES],
        env=os.environ | bucket.account(bucket.policy("writer")),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return bucket


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes the commands of this process use an account."""

    def switch(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return switch


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process: (exit code, stdout, stderr)."""

    def execute(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return execute


def reset(url: str) -> tuple[str, ...]:
    """A command that writes what `tiered serve` keeps."""
    return ("reset-offset", url, *NAMES, "--group", GROUP, "--topic", TOPIC, "--earliest", "--new-group")


def compact(url: str, spool: Path) -> tuple[object, ...]:
    """A command that joins objects."""
    return ("compact", url, "--apply", "--older-than", "0s", "--spool", spool)


def erase(url: str) -> tuple[str, ...]:
    """A command that changes the catalog only."""
    return ("expire", url, "--topic", TOPIC, "--all", "--apply")


def small_objects(bucket: Bucket, use: Use, run: Run) -> str:
    """An archive of small objects, by the writer's account: its URL."""
    bucket.archives += 1
    url = f"{bucket.url}/small{bucket.archives}"
    use(bucket.account(bucket.policy("writer")))
    code, _, err = run("backfill", bucket.store, url, *NAMES, "--set", "offload.batch_bytes=512KiB")
    assert code == 0, err
    time.sleep(1.1)  # timestamps are whole seconds
    return url


# -- each policy is enough ----------------------------------------------------


def test_the_readers_policy_suffices(archived: Bucket, use: Use, run: Run) -> None:
    use(archived.account(archived.policy("reader")))
    code, out, err = run("ls", archived.url, "--json")
    assert code == 0, err
    assert sum(queue["messages"] for queue in json.loads(out)["queues"]) == MESSAGES
    code, out, err = run("cat", archived.url, TOPIC, "--queue", "0")
    assert code == 0 and len(out.splitlines()) > 1000, err
    code, out, err = run("verify", archived.url)
    assert code == 0, out + err
    assert run("gc", archived.url)[0] == 0, "a dry run only reads"


def test_the_writers_policy_suffices_to_run(archived: Bucket, tmp_path: Path) -> None:
    environment = os.environ | archived.account(archived.policy("writer"))
    url = f"s3://{archived.name}/{PREFIX}/run"
    command = (
        *TIERED,
        "run",
        "--store",
        str(archived.store),
        "--url",
        url,
        "--state-dir",
        str(tmp_path / "state"),
        "--set",
        "admin.port=0",
        *NAMES,
    )
    log = tmp_path / "run.log"
    with log.open("wb") as stream, subprocess.Popen(command, env=environment, stderr=stream) as process:
        try:
            root = PrefixedStore(open_store(url, archived.server.options()), ARCHIVE)
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s and process.poll() is None:
                if len(list(root.list("catalog/"))) >= 2:
                    break
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    assert "AccessDenied" not in log.read_text()
    assert len(list(root.list("catalog/"))) >= 2, log.read_text()
    root.close()


def test_the_servers_policy_suffices(archived: Bucket, use: Use, run: Run, tmp_path: Path) -> None:
    use(archived.account(archived.policy("server")))
    for _ in range(2):  # the second one replaces the first one's object
        code, _, err = run(*reset(archived.url))
        assert code == 0, err
    server, address = tiered_serve(archived.url, tmp_path, *NAMES)
    with stopping(server):
        server.start()
        code, out, err = run(
            "reset-offset", "--serve", address, "--group", GROUP, "--topic", TOPIC, "--offset", "5"
        )
        assert code == 0, err
    log = server.log.read_text()
    assert "AccessDenied" not in log
    code, out, err = run(*reset(archived.url), "--dry-run", "--json")
    assert {queue["before"] for queue in json.loads(out)["queues"]} == {5}, log


@contextmanager
def stopping(server: ChildServer) -> Iterator[None]:
    """Stop ``server`` at the end."""
    try:
        yield
    finally:
        server.stop()


def test_the_collectors_policy_suffices(archived: Bucket, use: Use, run: Run) -> None:
    garbage = archived.add_garbage()
    use(archived.account(archived.policy("collector")))
    time.sleep(1.1)  # timestamps are whole seconds
    code, out, err = run("gc", archived.url, "--apply", "--grace", "0", "--json")
    assert code == 0, err
    assert garbage in set(json.loads(out)["delete"])


def test_the_writers_policy_suffices_to_compact(archived: Bucket, use: Use, run: Run, tmp_path: Path) -> None:
    url = small_objects(archived, use, run)
    code, out, err = run(*compact(url, tmp_path), "--json")
    assert code == 0, err
    done = json.loads(out)
    assert done["objects"] > done["newObjects"] > 0
    code, out, err = run("verify", url)
    assert code == 0, out + err


def test_the_collectors_policy_suffices_to_expire(archived: Bucket, use: Use, run: Run) -> None:
    url = small_objects(archived, use, run)
    use(archived.account(archived.policy("collector")))
    code, out, err = run(*erase(url), "--json")
    assert code == 0, err
    erased = json.loads(out)
    assert erased["applied"] and erased["rows"] > 0
    code, out, err = run("verify", url)
    assert code == 0, out + err
    listed = json.loads(run("ls", url, "--json")[1])["queues"]
    assert not sum(queue["messages"] for queue in listed if queue["topic"] == TOPIC)


# -- and nothing else --------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_no_role_leaves_its_prefix(archived: Bucket, role: str) -> None:
    """Neither the names nor the content of what lies beside, and no role deletes a commit."""
    root = open_store(f"s3://{archived.name}", archived.server.options())
    with suppress(AlreadyExistsError):
        root.put_if_absent("beside/secret", [b"x"])
    root.close()
    store = archived.archive(archived.policy(role))
    whole = store._store._store  # type: ignore[attr-defined]
    for act in (
        lambda: list(whole.list("beside/")),
        lambda: list(whole.list("")),
        lambda: whole.get("beside/secret"),
        lambda: whole.put_if_absent("beside/new", [b"x"]),
        lambda: whole.delete(["beside/secret"]),
        lambda: store.delete([catalog_key(1)]),
    ):
        with pytest.raises(AccessDeniedError):
            act()
    store.close()


def test_only_the_writer_creates_data(archived: Bucket) -> None:
    for role in ("reader", "server", "collector"):
        store = archived.archive(archived.policy(role))
        with pytest.raises(AccessDeniedError, match="s3:PutObject"):
            store.put_if_absent(f"data/by-{role}", [b"x"])
        store.close()


def test_plain_http_is_denied(tmp_path: Path, real_store: Callable[[str], Path], use: Use, run: Run) -> None:
    with running_minio(tmp_path / "minio", None) as server:
        plain = Bucket(server, server.fresh_bucket().removeprefix("s3://"), real_store("F") / "store", None)
        for has_tls, code in ((True, 2), (False, 0)):
            use(plain.account(for_minio(policy_of("writer", plain.name, PREFIX), has_tls=has_tls)))
            done, _, err = run("backfill", plain.store, plain.url, *NAMES)
            assert done == code, err


# -- an action taken away is named --------------------------------------------

COMMANDS = {
    "reader": lambda bucket: ("cat", bucket.url, TOPIC, "--queue", "0"),
    "writer": lambda bucket: ("backfill", bucket.store, f"{bucket.url}/new", *NAMES),
    "server": lambda bucket: reset(bucket.url),
    "collector": lambda bucket: ("gc", bucket.url, "--apply", "--grace", "0"),
}
TAKEN = [
    (role, action)
    for role in ROLES
    for action in sorted(set(allowed_actions(policy_of(role))), reverse=True)
    if action.startswith("s3:") and action != "s3:AbortMultipartUpload"
    if (role, action) != ("writer", "s3:DeleteObject")
]


@pytest.mark.parametrize(("role", "action"), TAKEN)
def test_an_action_taken_away_is_one_line_with_action_and_key(
    archived: Bucket, use: Use, run: Run, role: str, action: str
) -> None:
    if role == "collector":
        archived.add_garbage()
        time.sleep(1.1)
    if role == "server":
        use(archived.account(archived.policy(role)))
        assert run(*reset(archived.url))[0] == 0, "there is something to read and to delete"
    if role == "writer" and action != "s3:PutObject":
        use(archived.account(archived.policy("writer")))
        assert run(*COMMANDS[role](archived))[0] == 0, "there is a commit to read"
    use(archived.account(without(archived.policy(role), action)))
    code, _, err = run(*COMMANDS[role](archived))
    (line,) = [line for line in err.splitlines() if line.startswith("tiered: ")]
    assert code == AccessDeniedError.exit_code, err
    assert f": {action}: AccessDenied" in line
    assert line.split("s3://")[1].startswith(f"{archived.name}/{PREFIX}"), line
    assert "Traceback" not in err


def test_the_writer_may_copy_parts_and_a_denied_copy_names_both_actions(archived: Bucket) -> None:
    store = archived.archive(archived.policy("writer"))
    store.put_if_absent("data/source", [bytes(6 << 20)])
    store.compose_if_absent("data/composed", [ObjectRange("data/source", 0, 6 << 20), b"tail"])
    assert store.get("data/composed").endswith(b"\0tail")
    store.close()
    store = archived.archive(without(archived.policy("writer"), "s3:GetObject"))
    with pytest.raises(AccessDeniedError, match="s3:PutObject or s3:GetObject: AccessDenied"):
        store.compose_if_absent("data/denied", [ObjectRange("data/source", 0, 6 << 20), b"tail"])
    store.close()
