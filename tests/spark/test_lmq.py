"""LMQs read from a broker's store directory equal those of its consume queues."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.lmq_truth import EVERYTHING, Units, truth_of
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.spark.plain_read import read_without_spark


@pytest.mark.parametrize("name", ["L", "M", "N", "O"])
def test_lmqs_of_a_store_directory_equal_those_of_its_broker(
    name: str, real_store: Callable[[str], Path]
) -> None:
    directory = real_store(name)
    truth = truth_of(directory, EVERYTHING)
    options = {
        "path": str(directory / "store"),
        "source": "store",
        "cluster": CLUSTER,
        "broker": BROKER,
        "brokerConf": str(directory / "broker.conf"),
        "topic": ",".join(sorted({topic for topic, _ in truth})),
    }
    found: Units = {}
    for batch in read_without_spark(options, ["topic", "queueId", "queueOffset", "commitLogOffset"]):
        for row in batch.to_pylist():
            place = row["queueOffset"], row["commitLogOffset"]
            found.setdefault((row["topic"], row["queueId"]), []).append(place)
    assert {queue: sorted(rows) for queue, rows in found.items()} == truth
