"""Objects that others plant or alter, of every prefix, before every reader: each ends in a typed error or takes no
notice, in bounded memory and time."""

import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rocketmq_tiered.cli import EXIT_INTERNAL
from rocketmq_tiered.server.mount.node_lease import NodeLease, NodeState, encode_lease, lease_key
from tests.end_to_end.offloading import SMALL, backfill
from tests.maintenance.restored import archived, written
from tests.spark.plain_read import read_without_spark
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.errors import NotFoundError, TieredError
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.wrapper import StoreWrapper

HOME = "FxCluster/fx-a"
CPU_S_MAX, GROWTH_BYTES_MAX = 10.0, 256 << 20
FAST_EVERY = 37

Run = Callable[..., tuple[int, str, str]]


class Planted(NamedTuple):
    """``key``: below the archive's prefix, or above it if it begins with a slash. ``content`` None: the object is
    removed. ``is_foreign``: no commit names it, and readers must not notice."""

    key: str
    how: str
    content: bytes | None
    is_foreign: bool


def built(directory: Path) -> Path:
    """An archive of some cycles, with the lease of a node beside it."""
    archived(written(directory / "store", messages=300), directory / "archive")
    lease = NodeLease("n1", "a" * 16, 1, NodeState.ACTIVE, 10_000)
    put(directory / "archive" / lease_key("n1", 1), encode_lease(lease))
    return directory / "archive"


def put(path: Path, content: bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def altered(own: dict[str, bytes]) -> Iterator[Planted]:
    """Every object, altered in many ways."""
    rng = random.Random(57)
    for key, data in own.items():
        flips = [bytearray(data) for _ in range(6)]
        for flipped in flips:
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        other = own[rng.choice([one for one in own if one != key])]
        changes = {
            "removed": None,
            "empty": b"",
            "a byte": data[:1],
            "half": data[: len(data) // 2],
            "without its end": data[:-7],
            "without its begin": data[7:],
            "twice": data * 2,
            "zeros": bytes(len(data)),
            "noise": rng.randbytes(len(data)),
            "another": other,
            **{f"flip {number}": bytes(flipped) for number, flipped in enumerate(flips)},
        }
        for how, content in changes.items():
            yield Planted(key, how, content, is_foreign=False)


HUGE, ARABIC = "9" * 20, "٠" * 20
NAMES = (
    *(
        f"catalog/{name}"
        for name in ("0" * 20, HUGE, "1" * 20, ARABIC, "9" * 19, "x", "-1", f"{HUGE}.tmp", f"{HUGE}/x")
    ),
    *(
        f"pages/{name}"
        for name in ("x", f"segments-{HUGE}-1-x", f"segments-{7:020d}-{'9' * 16}-x", f"-{HUGE}-1-")
    ),
    *(
        f"state/{name}"
        for name in ("x", f"topics-{'9' * 16}-{HUGE}-x", f"topics-1-{HUGE}-{'f' * 64}", "topics-1-1-")
    ),
    *(f"state/serve/{name}" for name in (HUGE, ARABIC, "0" * 20, "1", f"retry-{HUGE}", f"retry/{HUGE}", "x")),
    *(
        f"sets/00/{name}"
        for name in (f"{HUGE}-1-1.sso", f"x-{'9' * 16}-{HUGE}.sso", f"{7:020d}-1-{ARABIC}.sso", "x")
    ),
    *(
        f"data/00/{topic}/{generation}/{queue}/{base}-{epoch}-{attempt}.so"
        for topic, generation, queue, base, epoch, attempt in (
            ("t0", 0, 0, HUGE, 1, 1),
            ("t0", 0, "9" * 10, f"{0:020d}", 1, 1),
            ("t0", 0, "-" + "9" * 10, f"{0:020d}", 1, 1),
            ("t0", "9" * 10, 0, f"{0:020d}", "9" * 16, HUGE),
            (".zz", 0, 0, f"{0:020d}", 1, 1),
            (".41", 0, 0, f"{0:020d}", 1, 1),
            ("t0", 0, 0, ARABIC, 1, 1),
            ("...", 0, 0, f"{0:020d}", 1, 1),
        )
    ),
    *(f"timer/{name}" for name in ("x", f"{HUGE}-{'9' * 16}", f"{0:020d}-1", f"{ARABIC}-1")),
    *(f"index/{name}" for name in ("x", f"{HUGE}-{HUGE}-{'9' * 16}_x.idx", f"{0:013d}-{0:013d}-1_x.idx")),
    *(f"{name}" for name in ("quarantine/x", "private/key", "exports/part-0.parquet", "unknown", "doctor/x")),
    *(
        f"/mount.nodes/{name}"
        for name in (f"evil/{HUGE}", f"n1/{HUGE}", f"n1/{ARABIC}", "n1/0", "x", f"{HUGE}")
    ),
    *(f"/mount.archives/{name}" for name in ("FxCluster/fx-a", ".zz/.zz", "x", "a/b/c", f"{HUGE}/{HUGE}")),
    *(
        f"/{name}"
        for name in ("x", ".zz/.zz/catalog/" + HUGE, "other/broker/catalog/" + HUGE, "FxCluster/catalog/x")
    ),
)


def planted(own: dict[str, bytes]) -> Iterator[Planted]:
    """Names that another account may choose, with contents that it may choose."""
    commit = own[next(key for key in own if key.startswith("catalog/"))]
    segment = own[next(key for key in own if key.startswith(("sets/", "data/")))]
    contents = {
        "empty": b"",
        "garbage": b"garbage",
        "a commit": commit,
        "a segment": segment,
        "a large one": bytes(5 << 20),
        "digits": b"1" * 20,
    }
    for key in NAMES:
        for how, content in contents.items():
            yield Planted(key, how, content, is_foreign=not key.startswith("catalog/"))


class RacedStore(StoreWrapper):
    """Another account knows the next names of the writer, and puts garbage there first."""

    raced = 0

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        if key.startswith((f"{HOME}/data/", f"{HOME}/sets/")) and self.raced < 4:
            self.raced += 1
            super().put_if_absent(key, [b"garbage"])
        super().put_if_absent(key, body, timeout_s=timeout_s)


def test_garbage_at_the_next_names_of_the_writer_delays_it_and_is_deleted(tmp_path: Path) -> None:
    root = MemoryStore()
    store, raced = written(tmp_path / "store", messages=300), RacedStore(root)
    backfill(store.path, raced, settings=SMALL)
    archive = PrefixedStore(root, HOME)
    assert raced.raced == 4 and verify_archive(archive, depth="full").anomalies == []
    garbage = {info.key for info in archive.list("") if info.size_bytes == len(b"garbage")}
    assert len(garbage) == 4 and garbage <= load(archive).pending_deletions.keys()


def corpus(archive: Path) -> list[Planted]:
    own = {
        str(path.relative_to(archive / HOME)): path.read_bytes()
        for path in sorted((archive / HOME).rglob("*"))
        if path.is_file()
    }
    return [*altered(own), *planted(own)]


NAMED = ("--cluster", "FxCluster", "--broker", "fx-a")
READERS: dict[str, tuple[str, ...]] = {
    "by offset": ("cat", "URL", "t0", "--from", "3"),
    "by time": ("cat", "URL", "t1", "--since", "1970-01-02", "--limit", "9"),
    "by key": ("query", "URL", "--topic", "t1", "--key", "k", "--all-time"),
    "list": ("ls", "URL", "--histories", "--hidden"),
    "verify": ("verify", "URL", "--full"),
    "sql": ("sql", "URL", "SELECT count(*) FROM t2"),
    "mount": ("mount", "ls", "URL"),
    "timers": ("timers", "ls", "URL"),
    "restore": ("restore", "URL", "STORE"),
    "repair, dry": ("repair", "URL"),
    "gc, dry": ("gc", "URL"),
    "gc": ("gc", "COPY", "--apply", "--grace", "0s"),
    "repair": ("repair", "COPY", "--apply"),
}


def said(run: Run, archive: Path) -> dict[str, tuple[int, str]]:
    """What every reader says of ``archive``."""
    found = {}
    copy, store, url = archive.with_name("copy"), archive.with_name("restored"), f"file://{archive}"
    places = {"URL": url, "COPY": f"file://{copy}", "STORE": str(store)}
    begun_s, peak_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, words in READERS.items():
        for left in (copy, store, store.with_name("restored.restoring")):
            shutil.rmtree(left, ignore_errors=True)
        if "COPY" in words:
            shutil.copytree(archive, copy)
        names = () if name == "mount" else NAMED
        code, out, err = run(*(places.get(word, word) for word in words), *names)
        assert code != EXIT_INTERNAL, (name, err)
        found[name] = code, out or err
    options = {"path": url, "topic": "t0", "cluster": "FxCluster", "broker": "fx-a"}
    try:
        batches = read_without_spark(options, ["topic", "queueOffset", "body"])
        found["spark"] = 0, str(sum(map(len, batches)))
    except TieredError as error:
        found["spark"] = error.exit_code, str(error)
    assert time.process_time() - begun_s < CPU_S_MAX
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib) << 10 < GROWTH_BYTES_MAX
    return found


def check(run: Run, archive: Path, clean: dict[str, tuple[int, str]], one: Planted) -> None:
    """Plant ``one``, read it with every reader, and put back what was there."""
    path = archive / one.key[1:] if one.key.startswith("/") else archive / HOME / one.key
    before = path.read_bytes() if path.is_file() else None
    put(path, one.content)
    found = said(run, archive)
    put(path, before)
    if one.is_foreign:
        for reader in ("by offset", "by time", "by key", "sql", "timers", "spark"):
            assert found[reader] == clean[reader], (one[:2], reader)


@pytest.mark.parametrize(
    "every", [FAST_EVERY, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_no_planted_object_ends_a_reader_without_a_typed_error(run: Run, tmp_path: Path, every: int) -> None:
    archive = built(tmp_path)
    said(run, archive)  # loads and compiles what readers need
    clean = said(run, archive)
    assert {code for code, _ in clean.values()} <= {0, NotFoundError.exit_code}, clean
    objects = corpus(archive)
    assert len(objects) >= 500
    for one in objects[::every]:
        check(run, archive, clean, one)
