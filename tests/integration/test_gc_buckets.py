"""Garbage collection in buckets that keep what is deleted, that refuse some of it, and in another S3 server."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.cli import main
from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, append_draft, queue, writer
from tests.end_to_end.offloading import backfill
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.object_store.open_store import open_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

KEYS = 3_000
Command = Callable[..., dict[str, Any]]


@pytest.fixture
def command(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command with --json; its document."""

    def run(server: RunningStore, *arguments: str) -> dict[str, Any]:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        capsysbinary.readouterr()
        assert main([*arguments, "--json"]) == 0, arguments
        found: dict[str, Any] = json.loads(capsysbinary.readouterr().out)
        return found

    return run


def bucket_of(url: str) -> str:
    return url.removeprefix("s3://").split("/")[0]


def archived(server: RunningStore, url: str, store: Path) -> str:
    root = open_store(f"{url}/archive", server.options())
    backfill(store / "store", root)
    root.close()
    return f"{url}/archive"


def expired_and_collected(command: Command, server: RunningStore, url: str) -> list[dict[str, Any]]:
    """What both commands print, after a topic was erased and its objects deleted."""
    time.sleep(2)  # some buckets have timestamps in whole seconds
    erased = command(server, "expire", url, "--topic", "t_k_one", "--all", "--apply")
    rules = ("--set", "retention.ttl=1h", "--set", "retention.min_archived=1ms")
    command(server, "expire", url, *rules, "--yes", "--apply")
    collected = command(server, "gc", url, "--apply", "--grace", "0")
    assert collected["delete"] and not collected["failed"]
    command(server, "verify", url, "--full", "--strict")
    return [erased, collected]


def noncurrent(server: RunningStore, url: str) -> set[str]:
    pages = server.client().get_paginator("list_object_versions").paginate(Bucket=bucket_of(url))
    return {found["Key"] for page in pages for found in page.get("Versions", ()) if not found["IsLatest"]}


@pytest.mark.parametrize("days", [0, 30])
def test_a_versioned_bucket_keeps_what_is_deleted_and_it_is_said(
    days: int, minio_url: RunningStore, real_store: Callable[[str], Path], command: Command
) -> None:
    url = minio_url.fresh_bucket()
    client, bucket = minio_url.client(), bucket_of(url)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    if days:
        rule = {
            "ID": "old",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "NoncurrentVersionExpiration": {"NoncurrentDays": days},
        }
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    url = archived(minio_url, url, real_store("F"))
    _, collected = expired_and_collected(command, minio_url, url)
    (line,) = collected["stays"]
    assert ("for 30 days" if days else "forever") in line and "noncurrent versions" in line
    deleted = {key for key in noncurrent(minio_url, url) if key.endswith((".so", ".sso"))}
    assert deleted and all(any(key.endswith(one) for one in collected["delete"]) for key in deleted)


@pytest.mark.parametrize("fixture", ["minio_url", "localstack_url"])
def test_a_plain_bucket_is_empty_of_what_expired(
    fixture: str, request: pytest.FixtureRequest, real_store: Callable[[str], Path], command: Command
) -> None:
    server: RunningStore = request.getfixturevalue(fixture)
    url = archived(server, server.fresh_bucket(), real_store("F"))
    _, collected = expired_and_collected(command, server, url)
    assert collected["stays"] == []
    listed = server.client().list_objects_v2(Bucket=bucket_of(url))["Contents"]
    assert not [found["Key"] for found in listed if found["Key"].endswith((".so", ".sso"))]


def test_one_key_of_thousands_that_cannot_be_deleted_costs_one_key(minio_url: RunningStore) -> None:
    url = minio_url.fresh_bucket()
    root = open_store(f"{url}/a", minio_url.options())
    made = writer(root)
    made.claim()
    keys = [f"sets/00/x-1-{number}.sso" for number in range(KEYS)]
    draft = append_draft(made.state, {queue("a"): 1})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: root.put_if_absent(key, [b"x"]), (*keys, *draft.object_keys)))
    made.append(draft)
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=keys, created_ms=NOW_MS))
    locked = keys[1_234]
    resource = f"arn:aws:s3:::{bucket_of(url)}"
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": ["s3:*"], "Resource": [resource, f"{resource}/*"]},
            {"Effect": "Deny", "Action": ["s3:DeleteObject"], "Resource": [f"{resource}/a/{locked}"]},
        ],
    }
    account = replace(minio_url.options(), credentials=minio_url.account(policy))
    store = open_store(f"{url}/a", account)
    plan = run_gc(store, load(store), apply=True, grace_ms=0, clock=store.clock_ms)
    assert list(plan.failed) == [locked] and "AccessDenied" in plan.failed[locked]
    assert [info.key for info in root.list("sets/00/x-")] == [locked]
