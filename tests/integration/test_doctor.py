"""`tiered doctor` on real object stores and beside a real broker's store: each missing permission is one line.

`tiered doctor` beside real brokers: what it reaches, and what it says of a wrong port and of a stopped broker.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.cli import main
from tests.deploy.bucket_policies import Policy, for_minio, policy_of, without
from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.child import free_port
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PREFIX = "some/prefix"
NAMES = ("--cluster", "c", "--broker", "b")
Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def doctor(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs the command as an account: exit code and checks by id."""

    def run(server: RunningStore, url: str, *more: str, policy: Policy | None = None) -> Any:
        environment = server.environment()
        if policy is not None:
            keys = server.account(policy)
            environment |= {
                "AWS_ACCESS_KEY_ID": keys.access_key,
                "AWS_SECRET_ACCESS_KEY": keys.secret_key,
                "AWS_SESSION_TOKEN": str(keys.session_token),
            }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        capsysbinary.readouterr()
        code = main(["doctor", url, *NAMES, "--json", *more])
        return code, {check["id"]: check for check in json.loads(capsysbinary.readouterr().out)["checks"]}

    return run


def failures(checks: dict[str, dict[str, str]]) -> list[str]:
    return [name for name, check in checks.items() if check["outcome"] == "failed"]


def remaining(server: RunningStore, url: str) -> list[str]:
    """Keys, and uploads in parts, that are in the bucket."""
    bucket = url.removeprefix("s3://").split("/")[0]
    client = server.client()
    objects = client.list_objects_v2(Bucket=bucket).get("Contents", [])
    uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return [found["Key"] for found in (*objects, *uploads)]


def fresh(server: RunningStore) -> str:
    return f"{server.fresh_bucket()}/{PREFIX}"


# -- stores that implement S3 -------------------------------------------------


def test_minio_has_no_failure(minio_url: RunningStore, doctor: Doctor) -> None:
    url = fresh(minio_url)
    code, checks = doctor(minio_url, url)
    assert code == 0 and failures(checks) == [], checks
    own = [name for name in checks if name.startswith("bucket")]
    assert {checks[name]["outcome"] for name in own} == {"ok"} and len(own) == 18, own
    assert remaining(minio_url, url) == []


@pytest.mark.parametrize("fixture", ["localstack_url", "moto_url"])
def test_emulators_fail_only_where_they_differ(
    fixture: str, request: pytest.FixtureRequest, doctor: Doctor
) -> None:
    """An emulator may let several creates win, or store damaged bodies."""
    server: RunningStore = request.getfixturevalue(fixture)
    url = fresh(server)
    _, checks = doctor(server, url)
    expected = {"bucket-create-race"} | (set() if server.checks_bodies else {"bucket-checksum"})
    assert set(failures(checks)) <= expected, checks
    assert ("bucket-checksum" in failures(checks)) is not server.checks_bodies
    assert remaining(server, url) == []


# -- permissions --------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "check"),
    [
        ("s3:PutObject", "bucket-create"),
        ("s3:GetObject", "bucket-read"),
        ("s3:ListBucket", "bucket-list"),
        ("s3:DeleteObject", "bucket-delete"),
        ("s3:AbortMultipartUpload", "bucket-multipart-abort"),
    ],
)
def test_a_missing_permission_is_one_failure_with_its_statement(
    minio_url: RunningStore, doctor: Doctor, action: str, check: str
) -> None:
    url = fresh(minio_url)
    bucket = url.removeprefix("s3://").split("/")[0]
    policy = for_minio(policy_of("writer", bucket, PREFIX), has_tls=False)
    code, checks = doctor(minio_url, url, policy=without(policy, action))
    assert failures(checks) == [check], checks
    assert code == 1
    found = checks[check]
    assert f"{action}: AccessDenied" in found["detail"]
    keys = {"s3:ListBucket": "", "s3:DeleteObject": f"/{PREFIX}/*doctor/*.check"}
    resource = f"arn:aws:s3:::{bucket}{keys.get(action, f'/{PREFIX}/*')}"
    assert f'"Action": "{action}", "Resource": "{resource}"' in found["fix"]
    if action in ("s3:PutObject", "s3:GetObject", "s3:ListBucket"):
        assert remaining(minio_url, url) == []


def test_wrong_keys_and_a_missing_bucket_are_one_failure(
    minio_url: RunningStore, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, checks = doctor(minio_url, "s3://absent-bucket/x")
    assert failures(checks) == ["bucket"] and "NoSuchBucket" in checks["bucket"]["detail"]
    assert checks["bucket"]["fix"] == "create the bucket first" and code == 1
    wrong = RunningStore("wrong", minio_url.endpoint, "unknown-key", "secret-of-none", minio_url.server)
    code, checks = doctor(wrong, fresh(minio_url))
    assert failures(checks) == ["bucket"] and "InvalidAccessKeyId" in checks["bucket"]["detail"]
    assert code == 1


def test_a_store_that_does_not_answer_is_exit_4(minio_url: RunningStore, doctor: Doctor) -> None:
    away = RunningStore("away", "http://127.0.0.1:9", "a", "b", minio_url.server)
    code, checks = doctor(away, "s3://bucket/x")
    assert failures(checks) == ["bucket"] and code == 4
    assert "127.0.0.1:9 is unreachable" in checks["bucket"]["detail"]
    assert "object_store.endpoint_url" in checks["bucket"]["fix"]


# -- rules of the bucket ------------------------------------------------------


def test_rules_of_the_bucket_are_reported(minio_url: RunningStore, doctor: Doctor) -> None:
    bucket = f"locked-{fresh(minio_url).removeprefix('s3://').split('/')[0]}"
    client = minio_url.client()
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    client.put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 3}},
        },
    )
    code, checks = doctor(minio_url, f"s3://{bucket}/{PREFIX}")
    assert checks["bucket-object-lock"]["detail"].startswith(
        "every object version is locked for 3 days (GOVERNANCE)"
    )
    assert failures(checks) == ["bucket-versioning"] and code == 1
    rules = [
        {
            "ID": "old",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 14},
        },
        {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "some/"}, "Expiration": {"Days": 30}},
    ]
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    code, checks = doctor(minio_url, f"s3://{bucket}/{PREFIX}")
    assert "14 days (rule old)" in checks["bucket-versioning"]["detail"]
    assert failures(checks) == ["bucket-lifecycle"] and code == 1
    assert "rule tidy deletes objects after 30 days" in checks["bucket-lifecycle"]["detail"]


def examine(sidecar: Sidecar, *more: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and checks by id, with the options of `tiered run`."""
    done = sidecar.tiered(
        "doctor",
        sidecar.url,
        "--store",
        str(sidecar.broker.store),
        "--broker-conf",
        str(sidecar.broker.broker_conf),
        "--state-dir",
        str(sidecar.directory / "state"),
        "--json",
        *more,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    return done.returncode, {check["id"]: check for check in document["checks"]}


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3", "5.5.0"])
def test_a_broker_its_wrong_port_and_its_end(version: str, tmp_path: Path, minio_url: RunningStore) -> None:
    scene = Scene(version)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        with Producer(sidecar.broker, scene, Load(500), tmp_path / "producer.out") as producer:
            producer.finish(60)
        code, checks = examine(sidecar)
        assert failures(checks) == [] and code == 0, checks
        for name in (
            "broker",
            "broker-version",
            "broker-clock",
            "name-servers",
            "pins",
            "broker-store",
            "names",
        ):
            assert checks[name]["outcome"] == "ok", checks[name]
        assert checks["broker-version"]["detail"] == f"V{version.replace('.', '_')}"
        assert sidecar.broker.broker_address in checks["broker"]["detail"]
        assert checks["retention-margin"]["outcome"] == "not checked"

        sidecar.start()
        sidecar.wait_until_following(60)
        code, checks = examine(sidecar)
        assert failures(checks) == [] and code == 0, checks
        assert f"used by the running process {sidecar.pid}" in checks["state-directory"]["detail"]
        assert checks["retention-margin"]["outcome"] == "ok"
        assert sidecar.stop() == 0

        port = free_port()
        code, checks = examine(sidecar, "--broker-address", f"127.0.0.1:{port}")
        assert failures(checks) == ["broker"] and code == 4
        assert f"127.0.0.1:{port} (--broker-address) does not answer" in checks["broker"]["detail"]

        sidecar.broker.stop()
        code, checks = examine(sidecar)
        assert failures(checks) == [] and code == 0, checks
        assert "the broker does not run" in checks["broker"]["detail"]
