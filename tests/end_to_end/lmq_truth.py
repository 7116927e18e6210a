"""Ground truth of real stores with LMQ entries."""

import json
from pathlib import Path

from tests.end_to_end.offloading import BROKER, CLUSTER
from tiered.model.queue import TopicFilter

Units = dict[tuple[str, int], list[tuple[int, int]]]
"""(queue offset, physical offset) of each record, by queue."""


EVERYTHING = TopicFilter(include_system=True, cluster=CLUSTER, broker=BROKER)


def truth_of(directory: Path, topic_filter: TopicFilter) -> Units:
    units: Units = {}
    for line in (directory / "truth" / "units.jsonl").read_text("utf-8").splitlines():
        topic, queue_id, offset, phys = json.loads(line)
        if topic_filter.admits(topic):
            units.setdefault((topic, queue_id), []).append((offset, phys))
    return units
