"""A damaged commitlog: what is lost is recorded with file and offset, all other queues are archived byte-exact."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.end_to_end.ground_truth import difference, load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tests.end_to_end.test_ground_truth import records_of
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.catalog.protocol import load
from tiered.flat_file.composite_flat_file import QueueReader
from tiered.flat_file.verify import verify_archive
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_word
from uploader.offload import Environment, Offloader, OffloadIdentity

NAME = "B"
# Where in a record: TOTALSIZE, MAGICCODE, PHYSICALOFFSET, and the first body byte of an IPv4 record.
PLACES = {"size": 0, "magic": 4, "physical offset": 28, "body": 88}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_one_flipped_byte_costs_one_record(
    place: str, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    original = real_store(NAME)
    truth = load_truth(original, NAME, FILTER)
    lines = max(truth.queues.values(), key=len)
    victim = next(line for line in lines[len(lines) // 2 :] if line["storeSize"] > 200)
    shutil.copytree(original / "store", tmp_path / "store")
    log = CommitLog([original / "store" / "commitlog"])
    file = log.file_at(victim["commitLogOffset"])
    assert file is not None
    copy = tmp_path / "store" / "commitlog" / file.path.name
    data = bytearray(copy.read_bytes())
    data[victim["commitLogOffset"] - file.begin_phys + PLACES[place]] ^= 0x40
    copy.write_bytes(data)

    said: list[tuple[str, Mapping[str, object]]] = []
    memory = MemoryStore(f"memory://damaged-{place}")
    with open_broker_store(tmp_path / "store") as store:
        result = Offloader(
            store, memory, OffloadIdentity(CLUSTER, BROKER, "test", "backfill"), SMALL,
            topic_filter=FILTER, word_source=no_word,
            environment=Environment(log=lambda message, fields: said.append((message, fields))),
        ).run(threading.Event(), follow=False)  # fmt: skip
    assert result.damaged == 1
    (damage,) = [fields for message, fields in said if "damaged" in message]
    assert damage["file"] == str(copy)
    assert damage["begin_phys"] == victim["commitLogOffset"]
    assert damage["end_phys"] == victim["commitLogOffset"] + victim["storeSize"]

    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    shown = {key[:2]: key for key in state.visible_queues()}
    for queue, expected in truth.queues.items():
        left = {line["queueOffset"]: line for line in expected if line is not victim}
        for offset, _, record in records_of(QueueReader(archive, state, shown[queue])):
            assert difference(record, left.pop(offset), log) == "", (queue, offset)
        assert left == {}, queue
    assert verify_archive(archive, full=True).anomalies == []
