"""One flipped bit anywhere: each of the newest commits, roots, run pages, deletion lists, index files, tables of the
broker, tails and blocks, in archives of real brokers' stores and in aged ones.

Of more than ``SOAK_REPAIR_SAMPLE`` commits, tails or blocks of an archive so many are drawn with a fixed seed, the
newest commit among them.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.maintenance.damaged_archive import BOTH, KINDS, Sound, aged_archive, compacted_archive
from tests.soak.results import knob, publish
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings, OffloadSettings

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

SAMPLE = knob("REPAIR_SAMPLE", 64)
SMALL = OffloadSettings(batch_bytes=96 << 10, split_bytes=48 << 10, block_bytes=16 << 10, root_every=4)
"""Many commits and objects of a store of some megabytes."""
INDEX = IndexSettings(unindexed_objects_max=8)


@pytest.mark.parametrize("name", ["compacted", "aged", "C", "E", "F", "H2", "K"])
def test_one_flipped_bit_anywhere(name: str, real_store: Callable[[str], Path], tmp_path: Path) -> None:
    begun_s, figures = time.monotonic(), dict[str, object]()
    if name in ("compacted", "aged"):
        sound = {"compacted": compacted_archive, "aged": aged_archive}[name](tmp_path)
    else:
        root, directory = MemoryStore(), real_store(name)
        backfill(directory / "store", root, settings=SMALL, index_settings=INDEX)
        figures["messages_of_the_broker"] = check_against_truth(root, directory, name)
        sound = Sound.of(PrefixedStore(root, archive_prefix(CLUSTER, BROKER)), (CLUSTER, BROKER))
    places, lost = sound.places(), 0
    for kind in KINDS:
        chosen = places[kind]
        if len(chosen) > SAMPLE:
            chosen = [*random.Random(1).sample(chosen[:-1], SAMPLE - 1), chosen[-1]]
        for number, place in enumerate(chosen):
            repair = sound.flipped_and_repaired(kind, place, runs_dry=number == 0)
            lost += repair.lost_messages
        figures[kind] = f"{len(chosen)} of {len(places[kind])}"
    for gone in ("catalog/", "pages/", BOTH):
        sound.robbed_and_repaired(gone)
    figures |= {"messages": sum(map(len, sound.truth.values())), "lost_and_named": lost}
    publish(f"repair, {name}", missed=[], **figures, minutes=round((time.monotonic() - begun_s) / 60, 1))
