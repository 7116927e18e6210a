"""NonStopWrite under load, on a real store: PUTs lost before effect, after effect and stalled, hundreds of each.

The proxy's log shows that no request names an abandoned key; a new object at the same base follows, with newer data
unless another attempt has it; and what other queues' messages wait longer stays within the batch age.
"""

import json
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.servers.proxy import Action, FaultProxy, ProxiedRequest
from tests.servers.running_store import RunningStore
from tests.soak.commit_times import commit_times, quantile
from tests.soak.request_log import archive_key, attempt_of, base_of, failed_puts, is_data_put, questions_about
from tests.soak.results import knob, limits, publish
from tiered.catalog.catalog_reader import head_version

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

FAULTS = knob("NSW_FAULTS", 200)
PER_SECOND = knob("NSW_PER_SECOND", 8_000)
KINDS = (Action.LOST_BEFORE, Action.LOST_AFTER, Action.STALL)
ATTEMPT_PROBABILITY = 0.35
OBJECT_PROBABILITY = 0.5
IN_A_ROW_MAX = 2
LEAD_IN_S = 5.0
"""Undisturbed: what a new process loads at its first commits is not NonStopWrite's."""
QUEUES = 8
"""Of each topic. A queue's share of a second is about the split size: stream objects and sets are both met."""
BATCH_AGE_MS = 1_000
ATTEMPT_TIMEOUT_MS = 400
PUBLISH_MS_MAX = 1_000
"""What an undisturbed commit may take beyond the batch age."""
SCENE_SETTINGS = {
    "TIERED_OFFLOAD__BATCH_BYTES": 8 << 20,
    "TIERED_OFFLOAD__BATCH_AGE_MS": BATCH_AGE_MS,
    "TIERED_OFFLOAD__SPLIT_BYTES": max(64 << 10, PER_SECOND * 420 // (2 * QUEUES)),
    "TIERED_OFFLOAD__ATTEMPT_TIMEOUT_MS": ATTEMPT_TIMEOUT_MS,
}
LOAD = Load(1 << 40, body_bytes=256, threads=4, per_second=PER_SECOND, batch=16)


class Mischief:
    """Decides which data PUTs fail. An attempt suffers at random, one kind after another, and then about half of its
    objects do; never more than IN_A_ROW_MAX attempts of one cycle running. Thread-safe."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._attempts: dict[str, Action] = {}
        self._tries: Counter[str] = Counter()
        self.done: Counter[Action] = Counter()
        self.is_on = False

    @property
    def is_over(self) -> bool:
        """Whether every kind was met often enough."""
        return min(self.done[kind] for kind in KINDS) >= FAULTS

    def __call__(self, request: ProxiedRequest) -> Action:
        if not is_data_put(request):
            return Action.PASS
        key = archive_key(request)
        with self._lock:
            self._tries[base_of(key)] += 1
            attempt = attempt_of(key)
            if attempt not in self._attempts:
                self._attempts[attempt] = self._draw(self._tries[base_of(key)])
            action = self._attempts[attempt]
            if action is not Action.PASS and self._random.random() >= OBJECT_PROBABILITY:
                action = Action.PASS
            self.done[action] += 1
            return action

    def _draw(self, tries: int) -> Action:
        spared = not self.is_on or self.is_over or tries > IN_A_ROW_MAX
        spared = spared or self._random.random() >= ATTEMPT_PROBABILITY
        return Action.PASS if spared else min(KINDS, key=lambda kind: self.done[kind])


def abandoned_ranges(sidecar: Sidecar) -> list[tuple[int, int]]:
    """[from_phys, to_phys) of every abandoned attempt, as the sidecar logged it."""
    lines = [json.loads(line) for line in sidecar.log.read_text().splitlines() if line.startswith("{")]
    return [(line["from_phys"], line["to_phys"]) for line in lines if "under new keys" in line["message"]]


def test_hundreds_of_lost_and_stalled_puts_under_load(tmp_path: Path, minio_url: RunningStore) -> None:
    mischief = Mischief(5)
    with FaultProxy(minio_url.endpoint, mischief) as proxy:
        scene = Scene(queues=QUEUES, settings=SCENE_SETTINGS, endpoint=proxy.endpoint)
        with beside_broker(scene, tmp_path, minio_url) as sidecar:
            sidecar.start()
            sidecar.wait_until_following(60)
            with Producer(sidecar.broker, scene, LOAD, tmp_path / "producer.out") as producer:
                waited = threading.Event()
                waited.wait(LEAD_IN_S)
                first_version = head_version(sidecar.open_archive()) + 1
                mischief.is_on = True
                while not mischief.is_over:
                    assert producer.is_running
                    waited.wait(0.5)
                sent = producer.finish(30, now=True)
            sidecar.wait_until_archived(120)
            requests = list(proxy.requests)
            ranges = abandoned_ranges(sidecar)
            times = commit_times(sidecar)
            compared = finish(sidecar)
    failed = failed_puts(requests)
    counts = {kind.name: len(failed.get(kind, ())) for kind in KINDS}
    keys = [archive_key(one) for some in failed.values() for one in some]
    puts = [archive_key(one) for one in requests if is_data_put(one)]
    last_attempt = {base_of(key): key for key in puts}
    ends = {commit.from_phys: commit.to_phys for commit in times}
    # A set's base is the range's; with newer data its queues may all have become stream objects.
    never_again = [
        key
        for key in keys
        if last_attempt[base_of(key)] == key
        and not (key.startswith("sets/") and int(base_of(key).rpartition("/")[2]) in ends)
    ]
    grown = sum(ends[begin] > end for begin, end in ranges)
    times = [commit for commit in times if commit.version >= first_version]
    latencies_ms = [commit.latency_ms for commit in times]
    disturbed = {begin for begin, _ in ranges}
    calm_ms = [commit.latency_ms for commit in times if commit.from_phys not in disturbed]
    publish(
        "non-stop write",
        missed=limits(
            each_fault_often_enough=all(count >= FAULTS for count in counts.values()),
            nobody_asks_about_an_abandoned_key=not questions_about(keys, requests),
            no_key_is_put_twice=len(puts) == len(set(puts)),
            a_new_object_at_the_same_base=not never_again,
            abandoned_ranges_are_committed=all(ends.get(begin, 0) >= end for begin, end in ranges),
            newer_data_is_taken_along=grown > 0,
            others_wait_no_longer_than_the_batch_age=max(latencies_ms) <= 2 * BATCH_AGE_MS + PUBLISH_MS_MAX,
            nothing_is_missing=compared.shown >= sent.acked,
            nothing_is_there_twice=compared.shown <= sent.acked + sent.failed,
        ),
        faults=counts,
        attempts_abandoned=len(ranges),
        took_newer_data=grown,
        commits=len(times),
        messages=compared.shown,
        messages_per_s=round(sent.acked / sent.seconds),
        seconds=round(sent.seconds),
        batch_age_ms=BATCH_AGE_MS,
        attempt_timeout_ms=ATTEMPT_TIMEOUT_MS,
        undisturbed_worst_ms=max(calm_ms, default=0),
        latency_p50_ms=quantile(latencies_ms, 0.5),
        latency_p99_ms=quantile(latencies_ms, 0.99),
        latency_worst_ms=max(latencies_ms),
        slowest_ms=sorted(latencies_ms)[-5:],
    )
