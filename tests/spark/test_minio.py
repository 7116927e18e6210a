"""The same rows from an object store server as from a directory; endpoint and credentials travel as options."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.spark import read
from tests.deploy.bucket_policies import Policy, for_minio, policy_of, without
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import FILTER
from tests.servers.running_store import REGION, RunningStore
from tests.spark.conftest import STORES
from tests.spark.row_truth import EVERY_COLUMN, differences, rows_by_place
from tests.spark.uploaded_archives import uploaded
from tiered.errors import AccessDeniedError
from tiered.object_store.interface import S3Credentials


def access(server: RunningStore, policy: Policy | None = None) -> dict[str, str]:
    """Options of the data source that reach the server, as an account with ``policy`` or as the server's owner."""
    keys = S3Credentials(server.access_key, server.secret_key) if policy is None else server.account(policy)
    return {
        "endpoint": server.endpoint,
        "region": REGION,
        "accessKey": keys.access_key,
        "secretKey": keys.secret_key,
        **({"sessionToken": keys.session_token} if keys.session_token else {}),
    }


def reader_of(url: str) -> Policy:
    """deploy/s3's policy for reading the archives at ``url``."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return for_minio(policy_of("reader", bucket, prefix), has_tls=False)


@pytest.mark.integration
@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:GetObject"])
def test_an_action_that_the_policy_lacks_is_named(
    spark: SparkSession, archive_of: Callable[[str], Path], minio_url: RunningStore, action: str
) -> None:
    url = uploaded(archive_of("F"), minio_url)
    with pytest.raises(AccessDeniedError, match=rf"{url}\S*: {action}: AccessDenied"):
        read(spark, url, **access(minio_url, without(reader_of(url), action))).count()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", ["file", "minio"])
def test_every_field_of_the_dataframe_equals_the_truth_of_every_store(
    where: str,
    spark: SparkSession,
    all_archives: Path,
    real_store: Callable[[str], Path],
    request: pytest.FixtureRequest,
) -> None:
    url, options = f"file://{all_archives}", {}
    if where == "minio":
        server: RunningStore = request.getfixturevalue("minio_url")
        url, options = uploaded(all_archives, server), access(server)
    compared = 0
    for name in STORES:
        frame = read(spark, url, columns=EVERY_COLUMN, broker=name, **options)
        rows = rows_by_place(frame.toArrow().to_batches())
        truth = load_truth(real_store(name), name, FILTER)
        for (topic, queue_id), lines in truth.queues.items():
            for line in lines:
                row = rows.pop((name, topic, queue_id, line["queueOffset"]))
                assert differences(row, line) == {}, line
                compared += 1
        assert {topic for _, topic, _, _ in rows} <= truth.compaction_topics
    assert compared > 260_000
