"""Commands whose keys are missing, wrong, open to others or away: what they say, and that nothing is written plain."""

import base64
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.object_store.sealed_scene import key_file, kms_key
from tests.process.sidecar import TIMEOUT_S, Sidecar
from tests.servers.proxy import Action, FaultProxy
from tests.servers.running_store import RunningStore
from tiered.object_store.archive_keys import decode_key_table

Run = Callable[..., tuple[int, str, str]]
KEY_PROGRAM = """\
#!{python}
import base64, os, pathlib, sys
if pathlib.Path("{away}").exists():
    sys.exit(75)
data = base64.b64decode(sys.stdin.buffer.read())
print(base64.b64encode(bytes(255 - byte for byte in data)).decode())
"""


def _ring(path: object) -> tuple[str, str]:
    return "--set", f"object_store.key_ring={path}"


def _backfill(run: Run, home: Path, *settings: object) -> tuple[int, str, str]:
    command = ("backfill", home / "store", f"file://{home}/archive", "--broker-conf", home / "broker.conf")
    return run(*command, "--set", "offload.batch_bytes=131072", *settings)


def _stored(home: Path) -> dict[Path, bytes]:
    paths = (home / "archive").rglob("*")
    return {path: path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("none", "k1"),
        ("another", "key k1 is not in"),
        ("another of this id", "key k1 of"),
        ("open to others", "is open to others (mode 0644)"),
    ],
)
def test_without_the_right_ring_all_end_with_exit_code_2_and_name_it(
    kind: str, named: str, run: Run, home: Path
) -> None:
    assert _backfill(run, home, *_ring(key_file(home / "ring", "k1")))[0] == 0
    before, url, ring = _stored(home), f"file://{home}/archive", home / "other"
    key_file(ring, "k2" if kind == "another" else "k1", seed=2)
    if kind == "open to others":
        ring = key_file(home / "ring", "k1")
        ring.chmod(0o644)
    settings = () if kind == "none" else _ring(ring)
    reading = [
        ("cat", url, "--all"),
        ("sql", url, "SELECT count(*) FROM messages"),
        ("query", url, "--key", "k0-3", "--topic", "t_k_four"),
        ("restore", url, str(home / "restored")),
        ("ls", url),
        ("compact", url, "--older-than", "0", "--apply"),
    ]
    for command in reading:
        code, _, error = run(*command, *settings)
        assert (code, named in error) == (2, True), (command, error)
    assert _backfill(run, home, *settings)[0] == 2
    sidecar = Sidecar(home, *settings)
    assert sidecar.process.wait(TIMEOUT_S) == 2
    assert named in sidecar.log.read_text()
    secret = key_file(home / "ring", "k1").read_text().split()[1]
    assert secret not in sidecar.log.read_text() and base64.b64decode(secret).hex() not in error
    assert _stored(home) == before


def test_a_rule_whose_key_the_ring_lacks_is_refused_before_anything_is_written(run: Run, home: Path) -> None:
    rule = 'topics.rules=[{"pattern": "t_*", "encryption_key": "payroll"}]'
    code, _, error = _backfill(run, home, *_ring(key_file(home / "ring", "k1")), "--set", rule)
    assert (code, "key payroll is not in" in error) == (2, True), error
    assert {path.parent.name for path in _stored(home)} <= {"keys"}


def _waits(home: Path, ring: str, away: Callable[[bool], object]) -> None:
    """Nothing is archived while the ring ``ring`` is ``away``, and everything once it is back."""
    away(True)
    with Sidecar(home, *_ring(ring)) as sidecar:
        sidecar.wait_until(lambda: sidecar.report().get("state") == "blocked: key ring")
        report = sidecar.report()
        assert "cannot be used now" in report["why"] and "tiered keys check" in report["step"]
        assert sidecar.get("/ready")[0] == 503 and sidecar.get("/health")[0] == 200
        assert _stored(home) == {}
        away(False)
        sidecar.wait_archived()
        away(True)  # a process that has its keys does not ask again
        assert sidecar.report()["state"] == "following"


def test_uploads_wait_while_the_command_that_has_the_key_is_away(home: Path) -> None:
    away, program = home / "away", home / "program"
    program.write_text(KEY_PROGRAM.format(python=sys.executable, away=away))
    program.chmod(0o700)
    _waits(home, f"command:k1:{program}", lambda is_away: away.touch() if is_away else away.unlink())


def _answer(kms: FaultProxy, fault: Action, is_away: bool) -> None:
    kms.decide = lambda _request: fault if is_away else Action.PASS


@pytest.mark.parametrize("fault", [Action.LOST_BEFORE, Action.SLOW_DOWN, Action.STALL])
def test_uploads_wait_while_kms_is_away_throttled_or_slow(
    fault: Action, home: Path, moto_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kms_key(moto_url, monkeypatch) as (kms, arn):
        _waits(home, f"aws-kms:{arn}", partial(_answer, kms, fault))


def test_what_kms_denies_ends_a_start_and_blocks_a_writer(
    run: Run, home: Path, moto_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer asks for keys again when its broker's files were away."""
    with kms_key(moto_url, monkeypatch) as (kms, arn):
        ring = _ring(f"aws-kms:{arn}")
        _answer(kms, Action.DENIED, True)
        refused = Sidecar(home, *ring)
        assert refused.process.wait(TIMEOUT_S) == 2
        assert "AccessDeniedException" in refused.log.read_text() and _stored(home) == {}
        _answer(kms, Action.DENIED, False)
        with Sidecar(home, *ring, name="second") as sidecar:
            sidecar.wait_archived()
            before = _stored(home)
            _answer(kms, Action.DENIED, True)
            (home / "store").rename(home / "away")
            sidecar.wait_until(lambda: sidecar.report().get("state") == "blocked: broker store")
            (home / "away").rename(home / "store")
            sidecar.wait_until(lambda: sidecar.report().get("state") == "blocked: key ring")
            assert "AccessDeniedException" in sidecar.report()["why"] and _stored(home) == before
        for fault, code in ((Action.DENIED, 2), (Action.LOST_BEFORE, 4)):
            _answer(kms, fault, True)
            found, _, error = run("cat", f"file://{home}/archive", "--all", *ring)
            assert (found, arn in error) == (code, True), error


def test_a_process_on_standby_gives_topics_other_keys_only_when_it_takes_over(home: Path) -> None:
    """What it writes then has the key of its own rule; what the writer writes until then has the key of the ring."""
    ring = key_file(home / "ring", "k1", "own")
    rule = "--set", 'topics.rules=[{"pattern": "t_*", "encryption_key": "own"}]'

    def topics() -> object:
        """The topics with keys of their own, as the newest key table names them."""
        newest = min((home / "archive").rglob("keys/[0-9]*"))
        return decode_key_table(newest.read_bytes(), str(newest)).topics

    with Sidecar(home, *_ring(ring)) as writer:
        writer.wait_archived()
        with Sidecar(home, *_ring(ring), *rule, name="other") as other:
            other.wait_until(lambda: other.report().get("state") == "standby")
            assert topics() == ()
    with Sidecar(home, *_ring(ring), *rule, "--take-over", name="third") as third:
        third.wait_until(lambda: topics() == (("t_*", "own"),))
