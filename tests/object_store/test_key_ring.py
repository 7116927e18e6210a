"""Rings: key files that others cannot read, AWS KMS (moto, LocalStack), and a command. No message has key material."""

import base64
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.object_store.sealed_scene import key_file, kms_key
from tests.servers.proxy import Action, FaultProxy
from tests.servers.running_store import RunningStore
from tests.sweeps import sweep
from tiered.errors import EncryptionKeyError, KeyRingAwayError, TieredError, UsageError
from tiered.object_store.interface import StoreOptions
from tiered.object_store.key_ring import KEY_BYTES, KeyRing, open_ring
from tiered.settings.sections import ObjectStoreSettings

KEY = bytes(range(KEY_BYTES))


def _ring(text: str, options: StoreOptions | None = None) -> KeyRing:
    credentials = None if options is None else options.credentials
    ring = open_ring(StoreOptions(ObjectStoreSettings(key_ring=text, region="us-east-1"), credentials))
    assert ring is not None
    return ring


def _check(ring: KeyRing) -> bytes:
    wrapped = ring.wrap(ring.current, KEY, "c/b/1")
    assert KEY not in wrapped
    assert ring.unwrap(ring.current, wrapped, "c/b/1") == KEY
    with pytest.raises(EncryptionKeyError):
        ring.unwrap(ring.current, wrapped, "c/b/2")
    return wrapped


def test_a_key_file_wraps_by_its_last_key(tmp_path: Path) -> None:
    path = key_file(tmp_path / "ring", "old", "new")
    ring = _ring(str(path))
    assert ring.current == "new"
    _check(ring)
    wrapped = ring.wrap("old", KEY, "p")
    for other, why in (
        (key_file(tmp_path / "a", "new"), "not in"),
        (key_file(tmp_path / "b", "old", seed=2), "not the"),
    ):
        with pytest.raises(EncryptionKeyError, match=why) as caught:
            _ring(str(other)).unwrap("old", wrapped, "p")
        assert "old" in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o601, 0o666])
def test_a_key_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path / "ring", "k")
    path.chmod(mode)
    with pytest.raises(UsageError, match="open to others"):
        _ring(str(path))


@pytest.mark.parametrize(
    "text", ["", "k", "k c2hvcnQ=", "k ???", "k/ {key}", "k {key}\nk {key}", "k {key} more", "\xff"]
)
def test_a_file_without_keys_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ring"
    path.write_bytes(text.format(key=base64.b64encode(KEY).decode()).encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(UsageError) as caught:
        _ring(str(path))
    assert base64.b64encode(KEY).decode() not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["keys", "aws-kms:", "command:k", "command:k:relative", "vault:k", "/does/not/exist"]
)
def test_what_is_no_ring_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"object_store\.key_ring"):
        _ring(text)


_PROGRAM = """#!/bin/sh
[ -e "$0.away" ] && exit 75
[ -e "$0.refuses" ] && exit 3
[ "$2" = key ] || exit 4
read text
case $1 in
  wrap) printf '%s %s' "$TIERED_PLACE" "$text" | base64 -w 0 ;;
  unwrap) set -- $(printf '%s' "$text" | base64 -d); [ "$1" = "$TIERED_PLACE" ] && echo "$2" ;;
esac
"""


def test_a_command_wraps_refuses_and_is_away(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(_PROGRAM)
    program.chmod(0o700)
    ring = _ring(f"command:key:{program}")
    wrapped = ring.wrap("key", KEY, "c/b/1")
    assert ring.unwrap("key", wrapped, "c/b/1") == KEY
    with pytest.raises(EncryptionKeyError, match="exit code 1"):
        ring.unwrap("key", wrapped, "c/b/2")
    (tmp_path / "program.away").touch()
    with pytest.raises(KeyRingAwayError, match="key cannot be used now"):
        ring.unwrap("key", wrapped, "c/b/1")
    (tmp_path / "program.away").rename(tmp_path / "program.refuses")
    with pytest.raises(EncryptionKeyError, match="exit code 3") as caught:
        ring.wrap("key", KEY, "c/b/1")
    assert base64.b64encode(KEY).decode() not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be run"):
        _ring(f"command:key:{tmp_path / 'none'}").wrap("key", KEY, "p")


@pytest.fixture
def kms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultProxy, str]]:
    """A key of the KMS of the server that the parameter names."""
    with kms_key(request.getfixturevalue(request.param), monkeypatch) as found:
        yield found


with_kms = pytest.mark.parametrize(
    "kms", sweep(["moto_url", "localstack_url"], fast=["moto_url"], rest="integration"), indirect=True
)


@with_kms
def test_kms_wraps_and_what_it_says_is_a_typed_error(
    kms: tuple[FaultProxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arn = kms[1]
    ring = _ring(f"aws-kms:{arn}")
    wrapped = _check(ring)
    with pytest.raises(EncryptionKeyError, match="NotFoundException"):
        ring.wrap("00000000-0000-0000-0000-000000000000", KEY, "p")
    with pytest.raises(EncryptionKeyError, match="is not the one"):
        ring.unwrap(arn, wrapped[:-1] + bytes([wrapped[-1] ^ 1]), "c/b/1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:1")
    with pytest.raises(KeyRingAwayError, match="cannot be used now"):
        _ring(f"aws-kms:{arn}").unwrap(arn, wrapped, "c/b/1")
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(EncryptionKeyError, match="ProfileNotFound"):
        _ring(f"aws-kms:{arn}").unwrap(arn, wrapped, "c/b/1")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Action.SLOW_DOWN, KeyRingAwayError),
        (Action.INTERNAL_ERROR, KeyRingAwayError),
        (Action.EXPIRED, KeyRingAwayError),
        (Action.LOST_AFTER, KeyRingAwayError),
        (Action.DENIED, EncryptionKeyError),
    ],
)
@with_kms
def test_refusals_of_kms_are_final_and_outages_are_not(
    kms: tuple[FaultProxy, str], fault: Action, kind: type[TieredError]
) -> None:
    proxy, arn = kms
    ring = _ring(f"aws-kms:{arn}")
    proxy.decide = lambda _request: fault
    with pytest.raises(kind, match=arn):
        ring.wrap(arn, KEY, "p")
    proxy.decide = lambda _request: Action.PASS
    _check(ring)


@pytest.mark.integration
def test_a_disabled_key_of_kms_is_refused(
    localstack_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kms_key(localstack_url, monkeypatch) as (_, arn):
        ring = _ring(f"aws-kms:{arn}")
        wrapped = _check(ring)
        boto3.client("kms", region_name="us-east-1").disable_key(KeyId=arn)
        with pytest.raises(EncryptionKeyError, match="DisabledException"):
            ring.unwrap(arn, wrapped, "c/b/1")
