"""Hadoop's settings for a bucket, and refused targets."""

from pathlib import Path

import pytest

from rocketmq_tiered.export.export_job import DELTA, PARQUET
from rocketmq_tiered.spark.jobs.export import DELTA_PACKAGE, delta_conf, export, s3a_settings
from tests.spark.jobs.export_runs import NO_SPARK, source
from tests.spark.jobs.inline_tasks import InlineTasks
from tiered.errors import UsageError
from tiered.object_store.interface import S3Credentials, StoreOptions
from tiered.settings.sections import ObjectStoreSettings


def test_hadoop_settings_follow_those_of_our_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    minio = ObjectStoreSettings(endpoint_url="http://127.0.0.1:9000", region="here")
    given = s3a_settings(StoreOptions(minio, S3Credentials("key", "secret")))
    assert given == {
        "endpoint": "http://127.0.0.1:9000",
        "endpoint.region": "here",
        "path.style.access": "true",
        "access.key": "key",
        "secret.key": "secret",
        "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    }
    session = s3a_settings(StoreOptions(minio, S3Credentials("key", "secret", "token")))
    assert session["session.token"] == "token"
    assert "Temporary" in session["aws.credentials.provider"]
    encrypted = s3a_settings(StoreOptions(ObjectStoreSettings(server_side_encryption="aws:kms", kms_key="k")))
    assert (encrypted["encryption.algorithm"], encrypted["encryption.key"]) == ("SSE-KMS", "k")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:word@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert not any(name.startswith("proxy.") for name in s3a_settings(StoreOptions(minio)))
    aws = s3a_settings(StoreOptions())
    proxied = {name.removeprefix("proxy."): value for name, value in aws.items() if name.startswith("proxy.")}
    assert proxied == {"host": "proxy", "port": "3128", "username": "user", "password": "word"}
    assert aws["path.style.access"] == "false"
    assert "DefaultCredentials" in aws["aws.credentials.provider"]
    assert "endpoint" not in aws


@pytest.mark.parametrize("format", [PARQUET, DELTA])
def test_targets_inside_the_archive_or_in_memory_are_refused(tmp_path: Path, format: str) -> None:
    archive = source(tmp_path / "archive")
    for target in (archive.path, f"{archive.path}/table", f"{archive.path}//x/../table"):
        with pytest.raises(UsageError, match="is inside the archive"):
            export(NO_SPARK, archive, target, format=format, tasks=InlineTasks())
    with pytest.raises(UsageError, match="tables cannot be written to"):
        export(NO_SPARK, archive, "memory://table", format=format)


def test_only_a_bucket_needs_hadoop_s3() -> None:
    assert delta_conf("file:///table")["spark.jars.packages"] == DELTA_PACKAGE
    assert "hadoop-aws" in delta_conf("s3://bucket/table")["spark.jars.packages"]
    with pytest.raises(UsageError, match="tables cannot be written to"):
        delta_conf("memory://table")
