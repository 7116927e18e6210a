"""Troubles of `tiered run`, each made for real beside a broker and MinIO, and what must be seen of it.

A trouble is made while the sidecar follows, or is there when it starts. Owns making them. Does not own looking
(operator_view.py) nor the table of what was seen (tests/soak/test_troubles.py).
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.bucket_policies import for_minio, policy_of, without
from tests.integration.client_scene import DELETE_EXPIRED_COMMITLOG, ask, until
from tests.integration.live import Sidecar
from tests.integration.live_scene import cut_tail
from tests.integration.operator_view import Signs
from tests.servers.child import free_port
from tests.servers.proxy import Action, FaultProxy, ProxiedRequest
from tests.servers.rocketmq import BROKER, CLUSTER, RocketMq
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.clock import Clock
from tiered.formats.keys import data_key
from tiered.model.queue import QueueKey

STARTED = {"TIERED_OFFLOAD__BATCH_AGE_MS": "500", "TIERED_ADMIN__HOST": "127.0.0.1"}


@dataclass
class Case:
    """One sidecar beside a broker, its object store behind a proxy, and what a trouble has opened."""

    directory: Path
    broker: RocketMq
    minio: RunningStore
    proxy: FaultProxy
    sidecar: Sidecar
    port: int
    opened: ExitStack

    @property
    def admin(self) -> str:
        """The admin port's address."""
        return f"http://127.0.0.1:{self.port}"

    def answers_with(self, action: Action) -> None:
        """From now on the store gives every request this answer."""
        self.proxy.decide = lambda _request: action

    def set(self, **settings: object) -> None:
        """Settings of the sidecar's environment, by ``SECTION__KEY``."""
        self.sidecar.settings = {
            **self.sidecar.settings,
            **{f"TIERED_{name}": str(value) for name, value in settings.items()},
        }

    def environment(self, **variables: str) -> None:
        """Other variables of the sidecar's environment."""
        self.sidecar.settings = {**self.sidecar.settings, **variables}

    def second(self, *arguments: str) -> Sidecar:
        """Another sidecar on the same archive, started."""
        directory = self.directory / "second"
        directory.mkdir()
        settings = {**self.sidecar.settings, "TIERED_ADMIN__PORT": "0"}
        other = Sidecar(
            self.broker, self.minio, self.sidecar.url, directory, arguments, settings, self.proxy.endpoint
        )
        other.start()
        self.opened.callback(_end, other)
        return other


@contextmanager
def case(directory: Path, broker: RocketMq, minio: RunningStore) -> Iterator[Case]:
    """A place for one trouble; its sidecar is not started."""
    directory.mkdir(parents=True)
    with ExitStack() as opened:
        proxy = opened.enter_context(FaultProxy(minio.endpoint))
        port = free_port()
        sidecar = Sidecar(
            broker,
            minio,
            f"{minio.fresh_bucket()}/live",
            directory,
            settings={**STARTED, "TIERED_ADMIN__PORT": str(port)},
            endpoint=proxy.endpoint,
        )
        opened.callback(_end, sidecar)
        yield Case(directory, broker, minio, proxy, sidecar, port, opened)


def _end(sidecar: Sidecar) -> None:
    if sidecar.process is not None and sidecar.process.poll() is None:
        sidecar.process.send_signal(signal.SIGCONT)
        sidecar.kill()


def _nothing(_case: Case) -> None:
    """No step."""


@dataclass(frozen=True)
class Trouble:
    """``prepare`` is called before the sidecar starts, ``make`` while it follows; None: the trouble is there at the
    start. ``ready``: the code of /ready. ``exit_code``: the sidecar ends with it. ``alert``: the one that must come.
    ``harms_broker``: no other case may use this broker at the same time; ``mend`` then restores it."""

    name: str
    signs: Signs
    alert: str
    make: Callable[[Case], None] | None = None
    prepare: Callable[[Case], None] = _nothing
    ready: int = 503
    exit_code: int | None = None
    harms_broker: bool = False
    mend: Callable[[Case], None] = _nothing


def state_is(word: str) -> str:
    """The metric of a state."""
    return rf'store_state\{{.*state="(?:{word})".*\}} 1\.0'


def attention(about: str) -> str:
    """The metric of a finding."""
    return rf'store_attention\{{about="{about}".*\}} 1\.0'


BLOCKED, FROZEN = state_is("blocked"), state_is("frozen")
CONNECTING = state_is("connecting")
NEVER = "(?!)"


def _answers(action: Action) -> Callable[[Case], None]:
    return lambda found: found.answers_with(action)


# -- the object store ------------------------------------------------------------------------------------------


def _store_away(found: Case) -> None:
    found.answers_with(Action.LOST_BEFORE)  # also on connections that are open
    found.proxy.close()


def _slow(found: Case) -> None:
    def late(_request: ProxiedRequest) -> Action:
        found.proxy.closing.wait(90)
        return Action.PASS

    found.proxy.decide = late


def _drop_bucket(found: Case) -> None:
    client = found.minio.client()
    bucket = found.sidecar.url.split("/")[2]
    found.answers_with(Action.STALL)  # nothing is written while it is emptied
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for item in page.get("Contents", ()):
            client.delete_object(Bucket=bucket, Key=item["Key"])
    client.delete_bucket(Bucket=bucket)
    client.close()
    found.answers_with(Action.PASS)


def _no_bucket(found: Case) -> None:
    found.sidecar.url = "s3://no-such-bucket/live"


def _wrong_secret(found: Case) -> None:
    found.environment(AWS_SECRET_ACCESS_KEY="not-the-secret")


def _may_not(action: str) -> Callable[[Case], None]:
    def make(found: Case) -> None:
        bucket = found.sidecar.url.split("/")[2]
        policy = for_minio(without(policy_of("writer", bucket, "live"), action), has_tls=False)
        keys = found.minio.account(policy)
        found.environment(
            AWS_ACCESS_KEY_ID=keys.access_key,
            AWS_SECRET_ACCESS_KEY=keys.secret_key,
            AWS_SESSION_TOKEN=str(keys.session_token),
        )

    return make


def _unknown_endpoint(found: Case) -> None:
    found.sidecar.endpoint = "http://store.invalid:9000"


def _tls_at_a_plain_store(found: Case) -> None:
    found.sidecar.endpoint = found.proxy.endpoint.replace("http:", "https:")


def _mistyped_url(found: Case) -> None:
    found.sidecar.start()
    found.sidecar.wait_until_following(60)
    found.sidecar.stop()
    found.sidecar.url = found.sidecar.url.replace("/live", "/lvie")


# -- the broker -------------------------------------------------------------------------------------------------


def _wrong_port(found: Case) -> None:
    found.sidecar.arguments = ("--broker-address", f"127.0.0.1:{free_port()}")


def _name_server_for_broker(found: Case) -> None:
    found.sidecar.arguments = ("--broker-address", found.broker.name_server_address)


def _broker_tls(found: Case) -> None:
    found.set(BROKER__TLS="true")


def _hang_broker(found: Case) -> None:
    os.kill(found.broker.broker.pid, signal.SIGSTOP)


def _continue_broker(found: Case) -> None:
    os.kill(found.broker.broker.pid, signal.SIGCONT)


def _stop_broker(found: Case) -> None:
    found.broker.broker.stop(timeout_s=40)


def _start_broker(found: Case) -> None:
    found.broker.broker.start()


def _cut_log(found: Case) -> None:
    """The broker loses what it had not flushed, as after a power failure."""
    found.broker.broker.kill()
    cut_tail(found.broker.store, 64 << 10)
    found.broker.broker.start()


def _fall_behind(found: Case) -> int:
    """The sidecar is down while the broker writes some files of its log. Where the archive ends."""
    found.sidecar.start()
    until(lambda: found.sidecar.status().get("messages", 0) > 0, "nothing is archived")
    found.sidecar.kill()
    store = found.sidecar.open_archive()
    archived_phys = load(store).cursor.phys
    store.close()
    log = found.broker.store / "commitlog"
    before = len(list(log.iterdir()))
    until(lambda: len(list(log.iterdir())) > before + 3, "the log does not grow", 120)
    return archived_phys


def _gap(found: Case) -> None:
    """The broker deletes its files while the sidecar is down."""
    archived_phys = _fall_behind(found)
    shutil.rmtree(found.directory / "state" / "pins", ignore_errors=True)
    log = found.broker.store / "commitlog"
    long_ago_s = time.time() - 100 * 3600
    for file in sorted(log.iterdir())[:-2]:
        os.utime(file, (long_ago_s, long_ago_s))
    ask(found.broker.broker_address, DELETE_EXPIRED_COMMITLOG)
    until(lambda: min(int(path.name) for path in log.iterdir()) > archived_phys, "nothing is deleted", 120)


def _slow_and_unreserved(found: Case) -> None:
    """Uploads are slower than the broker writes, and it deletes files as soon as the next one begins: some wait."""
    _fall_behind(found)
    found.set(OBJECT_STORE__UPLOAD_BYTES_PER_S="32768")
    conf = found.directory / "broker.conf"
    text = re.sub(r"(?m)^(fileReservedTime|deleteWhen).*$", "", found.broker.broker_conf.read_text())
    hours = ";".join(f"{hour:02d}" for hour in range(24))
    conf.write_text(f"{text}\nfileReservedTime=0\ndeleteWhen={hours}\n")
    found.sidecar.arguments = ("--broker-conf", str(conf))


# -- this program ------------------------------------------------------------------------------------------------


def _fence(found: Case) -> None:
    found.second("--take-over")


def _hang(found: Case) -> None:
    os.kill(found.sidecar.pid, signal.SIGSTOP)


def _kill(found: Case) -> None:
    found.sidecar.kill()


def _bad_reload(found: Case) -> None:
    (found.directory / "tiered.toml").write_text("[offload]\nno_such_key = 1\n")
    os.kill(found.sidecar.pid, signal.SIGHUP)


def _with_file(found: Case) -> None:
    path = found.directory / "tiered.toml"
    path.write_text("")
    found.sidecar.arguments = ("--config", str(path))


def _port_taken(found: Case) -> None:
    found.set(ADMIN__PORT=found.broker.broker_address.rpartition(":")[2])


def _expire_all(found: Case) -> None:
    found.set(
        RETENTION__TTL="1s", RETENTION__MIN_ARCHIVED="1s", GC__EVERY_MS="5000", RETENTION__MAX_SHARE="0.1"
    )


def _gc_denied(found: Case) -> None:
    found.set(GC__EVERY_MS="5000", GC__GRACE_MS="0")
    _may_not("s3:DeleteObject")(found)


def _garbage(found: Case) -> None:
    store = found.sidecar.open_archive()
    key = data_key(QueueKey("orphan", 0, 0), 1, epoch=1, attempt=900)
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


def _local_disk(found: Case) -> None:
    """A directory archive on a file system that is full."""
    place = found.directory / "small"
    (place / "fill").write_bytes(b"")
    with (place / "fill").open("wb") as fill:
        try:
            while True:
                fill.write(bytes(1 << 16))
                fill.flush()
        except OSError:
            pass


def _small_disk(found: Case) -> None:
    place = found.directory / "small"
    place.mkdir()
    assert os.system(f"mount -t tmpfs -o size=64m tmpfs {place}") == 0
    found.opened.callback(lambda: os.system(f"umount -l {place}"))
    found.sidecar.url = f"file://{place}/archive"


def _read_only_disk(found: Case) -> None:
    assert os.system(f"mount -o remount,ro {found.directory / 'small'}") == 0


def _proxy_mode(found: Case) -> None:
    address = f"127.0.0.1:{free_port()}"
    found.set(SERVE__BIND=address, SERVE__ADVERTISE=address)


def _stop_name_server(found: Case) -> None:
    found.broker.name_server.kill()


def _start_name_server(found: Case) -> None:
    found.broker.name_server.start()


def _blocked(name: str, make: Callable[[Case], None], cause: str, step: str) -> Trouble:
    """The store refuses or fails while the sidecar follows."""
    return Trouble(name, Signs(cause, step, BLOCKED), "TieredBlocked", make)


def _denied(action: str) -> Trouble:
    """The account lacks one permission from the start."""
    signs = Signs(f"s3:{action}", "policy", NEVER)
    return Trouble(
        f"{action} missing at the start",
        signs,
        "TieredNotRunning",
        prepare=_may_not(f"s3:{action}"),
        exit_code=2,
    )


def _ends(name: str, prepare: Callable[[Case], None], cause: str, step: str, exit_code: int) -> Trouble:
    return Trouble(name, Signs(cause, step, NEVER), "TieredNotRunning", prepare=prepare, exit_code=exit_code)


def _frozen(name: str, prepare: Callable[[Case], None], cause: str) -> Trouble:
    return Trouble(name, Signs(cause, "check the broker", FROZEN), "TieredFrozen", prepare=prepare)


def _attention(
    name: str,
    about: str,
    cause: str,
    step: str,
    alert: str,
    make: Callable[[Case], None] | None = None,
    prepare: Callable[[Case], None] = _nothing,
    *,
    harms_broker: bool = False,
    mend: Callable[[Case], None] = _nothing,
) -> Trouble:
    signs = Signs(cause, step, attention(about))
    return Trouble(name, signs, alert, make, prepare, 200, harms_broker=harms_broker, mend=mend)


NEEDS = "TieredNeedsAttention"
TROUBLES = (
    _blocked("store away", _store_away, "unreachable.*refused", "tiered doctor"),
    _blocked("store hangs", _answers(Action.STALL), "timed out|no answer|unreachable", "tiered doctor"),
    _blocked("store answers after 90 s", _slow, "timed out|no answer|unreachable", "tiered doctor"),
    _blocked("store throttles every request", _answers(Action.SLOW_DOWN), "SlowDown|503", "tiered doctor"),
    _blocked("store full", _answers(Action.FULL), "full|Full", "tiered doctor"),
    _blocked("store fails with 500", _answers(Action.INTERNAL_ERROR), "InternalError|500", "tiered doctor"),
    _blocked("bucket deleted", _drop_bucket, "NoSuchBucket|bucket.* exist", "tiered doctor"),
    _blocked("access denied while running", _answers(Action.DENIED), "AccessDenied", "tiered doctor"),
    _blocked("credentials expired", _answers(Action.EXPIRED), "ExpiredToken", "tiered doctor"),
    _blocked("clock off while running", _answers(Action.SKEWED), "RequestTimeTooSkewed", "tiered doctor"),
    Trouble(
        "store unreachable at the start",
        Signs("store.invalid", "tiered doctor", BLOCKED),
        "TieredBlocked",
        prepare=_unknown_endpoint,
    ),
    Trouble(
        "TLS to a plain store",
        Signs("SSL|TLS", "tiered doctor", BLOCKED),
        "TieredBlocked",
        prepare=_tls_at_a_plain_store,
    ),
    _ends("wrong bucket", _no_bucket, "NoSuchBucket|no-such-bucket", "bucket", 3),
    _ends("wrong secret", _wrong_secret, "SignatureDoesNotMatch|AccessDenied", "credentials|account", 2),
    _denied("ListBucket"),
    _denied("GetObject"),
    _denied("PutObject"),
    _ends("mistyped URL", _mistyped_url, "lvie", "new-archive", 2),
    _ends("admin port taken", _port_taken, "cannot listen", "admin.port", 2),
    Trouble(
        "local disk full",
        Signs("No space left|disk is full", "free space", BLOCKED),
        "TieredBlocked",
        _local_disk,
        _small_disk,
    ),
    Trouble(
        "local disk read-only",
        Signs("Read-only file system", "mount the file system", BLOCKED),
        "TieredBlocked",
        _read_only_disk,
        _small_disk,
    ),
    _frozen("wrong broker port", _wrong_port, r"127\.0\.0\.1:\d+.*refused"),
    _frozen("a name server instead of the broker", _name_server_for_broker, r"127\.0\.0\.1:\d+"),
    Trouble(
        "TLS mismatch with the broker",
        Signs("TLS|SSL|certificate", "broker.tls|check the broker", FROZEN),
        "TieredFrozen",
        prepare=_broker_tls,
    ),
    Trouble(
        "broker hangs",
        Signs("does not answer|no answer|timed out", "check the broker", FROZEN),
        "TieredFrozen",
        _hang_broker,
        harms_broker=True,
        mend=_continue_broker,
    ),
    _attention(
        "broker down",
        "broker-down",
        "the broker does not run",
        "start the broker",
        NEEDS,
        _stop_broker,
        harms_broker=True,
        mend=_start_broker,
    ),
    _attention(
        "log truncated",
        "diverged-log",
        "truncated or replaced",
        "ls ARCHIVE_URL --histories",
        "TieredMessagesHidden",
        _cut_log,
        harms_broker=True,
    ),
    _attention(
        "gap",
        "gaps",
        r"\d+ gaps|gap recorded",
        "tiered ls",
        "TieredGapRecorded",
        None,
        _gap,
        harms_broker=True,
    ),
    _attention(
        "name server away",
        "name-servers",
        "no name server answers",
        "name_servers",
        NEEDS,
        _stop_name_server,
        _proxy_mode,
        harms_broker=True,
        mend=_start_name_server,
    ),
    _attention(
        "short retention margin",
        "retention-margin",
        "deletes messages that are not archived",
        "fileReservedTime",
        "TieredWouldLoseData",
        None,
        _slow_and_unreserved,
    ),
    _attention(
        "brake of expiry", "expiry", "max_share", "tiered expire", "TieredExpiryStopped", None, _expire_all
    ),
    _attention(
        "gc denied",
        "garbage",
        "not deleted|could not be deleted",
        "allow deletes",
        "TieredGarbageNotCollected",
        _garbage,
        _gc_denied,
    ),
    _attention(
        "broken settings at a reload", "settings", "no_such_key", "SIGHUP", NEEDS, _bad_reload, _with_file
    ),
    Trouble(
        "fenced",
        Signs(
            "took over|taken over|fenced|another writer|owned by",
            "stop one of the two",
            state_is("fenced|standby"),
        ),
        "TieredFenced",
        _fence,
    ),
    Trouble("killed", Signs(NEVER, NEVER, NEVER), "TieredNotRunning", _kill, ready=0),
    Trouble("hung", Signs(NEVER, NEVER, NEVER), "TieredNotRunning", _hang, ready=0),
)
