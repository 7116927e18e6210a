"""Consumers beside a live broker while everything they depend on goes away and comes back: nothing is missing, no
orderly consumer sees a message before an earlier one, and clients that do not use the tiered proxy notice nothing."""

import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.integration.client_scene import (
    QUEUES,
    Consumer,
    Job,
    Line,
    all_there_is,
    begin_deleting,
    broker_range,
    delete_old_files,
    need_clients,
)
from tests.integration.live_scene import Sent
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.running_store import RunningStore
from tests.soak.results import knob, limits, publish
from tiered.catalog.catalog_reader import load

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(900)]

SHORT_OUTAGE_S, LONG_OUTAGE_S = 5, 40
"""A client asks for its routes every 30 s by default; Consume.java every second."""
SLOWLY = ("-Dconsume.pause.ms=40",)
DELETES_WITHIN_S = 90.0
"""A broker looks for files to delete every ten seconds, but not in its first minute."""
HAND_OVER_S = 60


@pytest.fixture
def tiered_proxy(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[ProxyScene]:
    need_clients("4.9.7", "5.3.3", "5.5.0")
    # Deletions are looked for every second instead of every ten.
    config = {"cleanResourceInterval": 1000}
    with proxy_beside_broker(tmp_path_factory.mktemp("storm"), minio_url, config, {}) as found:
        found.fill(8000, 500)
        found.wait_until_serving()
        yield found


def jumps(lines: Sequence[Line]) -> list[Line]:
    """Lines that came before an earlier one of their queue."""
    next_offset: Counter[int] = Counter()
    found = []
    for queue, offset in lines:
        if offset > next_offset[queue]:
            found.append((queue, offset))
        next_offset[queue] = max(next_offset[queue], offset + 1)
    return found


def repeated(lines: Sequence[Line]) -> int:
    """How many came again."""
    return len(lines) - len(set(lines))


def broker_minimum(tiered_proxy: ProxyScene, topic: str = "live0") -> int:
    """All that the broker has deleted of ``topic``, in messages."""
    return sum(broker_range(tiered_proxy, topic, queue)[0] for queue in range(QUEUES))


def wait_for_more(consumers: Sequence[Consumer], count: int, timeout_s: float = 120) -> None:
    """Until each has got so many more, or the same again."""
    targets = [len(consumer.lines()) + count for consumer in consumers]
    for consumer, target in zip(consumers, targets, strict=True):
        consumer.wait_for(target, timeout_s)


def test_nothing_is_missing_whatever_goes_away(tiered_proxy: ProxyScene) -> None:
    """The sidecar is killed twice while groups read what only the archive has, once for longer than clients keep
    routes, while the broker deletes; then the object store, the name server and the broker go and come back
    while a producer sends."""
    delete_old_files(tiered_proxy)
    sidecar, mq = tiered_proxy.sidecar, tiered_proxy.broker
    archive = sidecar.open_archive()
    with tiered_proxy.produce(10**6, per_second=100) as producer:
        many = 10**6
        push = tiered_proxy.consume(
            "push", "G-push", many, idle_s=600, version="4.9.7", flags=("-Dconsume.pause.ms=150",)
        )
        orderly = tiered_proxy.consume(
            "orderly", "G-orderly", many, idle_s=600, version="5.5.0", flags=SLOWLY
        )
        lite = tiered_proxy.consume("lite", "G-lite", many, idle_s=600)
        replaying = (push, orderly)
        for consumer in (*replaying, lite):
            consumer.wait_for(50)
        cold: list[bool] = []
        for number, outage_s in enumerate((SHORT_OUTAGE_S, LONG_OUTAGE_S), 2):
            sidecar.kill()
            cold += [len(set(consumer.lines())) < broker_minimum(tiered_proxy) for consumer in replaying]
            begin_deleting(tiered_proxy, load(archive).cursor.phys)  # what they would read at the broker next
            time.sleep(outage_s)
            sidecar.start()
            tiered_proxy.wait_until_serving(number)
            wait_for_more(replaying, 50)
        sidecar.object_server.stop()
        time.sleep(5)
        mq.name_server.stop()
        sidecar.object_server.start()
        time.sleep(5)
        mq.name_server.start()
        mq.broker.stop(timeout_s=40)
        time.sleep(5)
        mq.broker.start()
        wait_for_more(replaying, 50)
        mq.broker.kill()
        mq.broker.start()
        wait_for_more(replaying, 50)
        sent = producer.finish(60, now=True)
    wanted = all_there_is(tiered_proxy, "live0")
    for consumer in (push, orderly, lite):
        consumer.wait_for_all(wanted, 300)
    again = {name: repeated(c.lines()) for name, c in (("push", push), ("orderly", orderly), ("lite", lite))}
    jumped = jumps(orderly.lines())
    extra = [len(set(c.lines()) - wanted) for c in (push, orderly, lite)]
    publish(
        "proxy_storm",
        missed=limits(
            killed_mid_replay=all(cold), orderly_stays_ordered=not jumped, nothing_made_up=not any(extra)
        ),
        messages=len(wanted),
        missing=0,
        repeated=again,
        order_broken=len(jumped),
        sends_failed=sent.failed,
        outages_s=[SHORT_OUTAGE_S, LONG_OUTAGE_S],
    )


def delete_steadily(tiered_proxy: ProxyScene, until: threading.Event) -> None:
    """Have the broker delete every file as soon as it is archived, even if a client still reads it there."""
    store = tiered_proxy.sidecar.open_archive()
    while not until.wait(1):
        begin_deleting(tiered_proxy, load(store).cursor.phys)


@contextmanager
def alongside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """``work`` on a thread of its own, ended at the end."""
    until = threading.Event()
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work(until)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        until.set()
        thread.join()
    assert not failed, failed


def test_hand_over_while_the_broker_deletes(tiered_proxy: ProxyScene) -> None:
    """Consumers stand still for longer than the broker keeps messages, again and again: each time they continue in the
    archive and come back to a broker that deletes. Undisturbed: nothing missing, nothing twice, in order."""
    many = 10**6
    with tiered_proxy.produce(10**6, per_second=600) as producer:
        with alongside(lambda until: delete_steadily(tiered_proxy, until)):
            consumers = {
                "push": tiered_proxy.consume("push", "H-push", many, idle_s=600, version="4.9.7"),
                "orderly": tiered_proxy.consume("orderly", "H-orderly", many, idle_s=600, version="5.5.0"),
                "lite": tiered_proxy.consume("lite", "H-lite", many, idle_s=600),
                "tags": tiered_proxy.consume("push", "H-tags", many, idle_s=600, expression="Tag1 || Tag3"),
            }
            for consumer in consumers.values():
                consumer.wait_for(500)
            stalls = 0
            ends_s = time.monotonic() + knob("HAND_OVER_S", HAND_OVER_S)
            while time.monotonic() < ends_s:
                for consumer in consumers.values():
                    consumer.child.send_signal(signal.SIGSTOP)
                began = broker_range(tiered_proxy, "live0", 0)[1]
                deadline_s = time.monotonic() + DELETES_WITHIN_S
                while broker_range(tiered_proxy, "live0", 0)[0] < began:
                    assert time.monotonic() < deadline_s, "the broker deletes nothing"
                    time.sleep(0.2)
                for consumer in consumers.values():
                    consumer.child.send_signal(signal.SIGCONT)
                stalls += 1
                time.sleep(3)
        sent = producer.finish(60, now=True)
    wanted = all_there_is(tiered_proxy, "live0")
    consumers["push"].wait_for_all(wanted, 120)
    tagged = {(int(f[0]), int(f[1])) for f in consumers["push"].fields() if f[5] in ("Tag1", "Tag3")}
    groups = {group["name"]: group for group in tiered_proxy.sidecar.status()["proxy"]["groups"]}
    missed = []
    for name, consumer in consumers.items():
        expected = tagged if name == "tags" else wanted
        consumer.wait_for_all(expected, 120)
        lines = consumer.lines()
        group = groups[f"H-{name}"]
        missed += [
            f"{name}: {text}"
            for text in limits(
                nothing_twice=repeated(lines) == 0,
                nothing_made_up=set(lines) == expected,
                from_both=min(group["archivePulls"], group["brokerPulls"]) > stalls,
            )
        ]
    if jumped := jumps(consumers["orderly"].lines()):
        missed.append(f"orderly: {len(jumped)} out of order")
    publish(
        "proxy_hand_over",
        missed=missed,
        messages=len(wanted),
        stalls=stalls,
        sends_failed=sent.failed,
        repeated={name: repeated(consumer.lines()) for name, consumer in consumers.items()},
        pulls={name: [group["archivePulls"], group["brokerPulls"]] for name, group in groups.items()},
    )


def test_archived_messages_come_again_and_end_as_dead_letters(tiered_proxy: ProxyScene) -> None:
    """The broker cannot find what it deleted: the client sends such a message again itself."""
    delete_old_files(tiered_proxy)
    wanted = {
        f[4] for f in tiered_proxy.consume_all("5.3.3", [Job("pull", "D-all", 10**6, "live1", idle_s=2)])[0]
    }
    dead = tiered_proxy.consume("push", "D-dead", 10**6, topic="live1", idle_s=40, failures=99, times_max=1)
    again = tiered_proxy.consume(
        "push", "D-again", len(wanted), topic="live1", idle_s=60, failures=2, version="4.9.7"
    )
    assert dead.child.wait(300) == 0 and again.child.wait(300) == 0
    (letters,) = tiered_proxy.consume_all("5.3.3", [Job("pull", "D-letters", 10**6, "%DLQ%D-dead", idle_s=5)])
    found = {fields[4] for fields in letters}
    attempts = Counter(fields[4] for fields in dead.fields())
    consumed = {fields[4] for fields in again.fields() if fields[8] == "ok"}
    publish(
        "proxy_dead_letters",
        missed=limits(
            dead_letters_complete=found == wanted,
            given_back_twice=min(attempts.values()) >= 2,
            retried_complete=consumed == wanted,
        ),
        messages=len(wanted),
        archived_only=broker_minimum(tiered_proxy, "live1"),
        dead_letters=len(letters),
        retried=len(again.fields()),
    )


def send_for(tiered_proxy: ProxyScene, seconds: int) -> Sent:
    """A producer of the real name server at a steady rate; the first two seconds are not timed."""
    with tiered_proxy.produce(800 * seconds, per_second=800, warm_up_s=2) as producer:
        return producer.finish(seconds + 60)


def test_clients_of_the_broker_notice_nothing(tiered_proxy: ProxyScene) -> None:
    """Sends and a consumer of the real name server, alternately beside three groups that read at the broker and
    three that read the archive: all of them Java clients that share the machine."""
    delete_old_files(tiered_proxy)
    seconds = knob("HOT_S", 15)
    before = all_there_is(tiered_proxy, "live0")
    hot = tiered_proxy.consume("push", "C-hot", 10**6, idle_s=600, real=True)
    without, beside = [], []
    for number in range(3):
        for found, real in ((without, True), (beside, False)):
            groups = [
                tiered_proxy.consume("push", f"C-{number}-{n}-{real}", 10**6, idle_s=600, real=real)
                for n in range(3)
            ]
            for consumer in groups:
                consumer.wait_for(10)
            found.append(send_for(tiered_proxy, seconds))
            for consumer in groups:
                if not real:
                    consumer.wait_for_all(before, 120)
                consumer.kill()
    # Files are deleted for a while longer: it begins with the first message the broker has at that moment.
    first: dict[int, int] = {}
    for queue, offset in hot.lines():
        first[queue] = min(first.get(queue, offset), offset)
    assert all((queue, offset) in before for queue, offset in first.items()) and len(first) == QUEUES
    wanted = {line for line in all_there_is(tiered_proxy, "live0") if line[1] >= first[line[0]]}
    hot.wait_for_all(wanted, 60)
    figures = {
        name: {
            "p50_us": statistics.median(sent.p50_us for sent in found),
            "p99_us": statistics.median(sent.p99_us for sent in found),
            "per_second": round(sum(s.acked for s in found) / sum(s.seconds for s in found), 1),
            "failed": sum(sent.failed for sent in found),
        }
        for name, found in (("without", without), ("beside", beside))
    }
    publish(
        "proxy_hot_traffic",
        missed=limits(
            no_send_failed=figures["without"]["failed"] == figures["beside"]["failed"] == 0,
            rate_kept=figures["beside"]["per_second"] > 0.95 * figures["without"]["per_second"],
            hot_consumer_once=repeated(hot.lines()) == 0 and set(hot.lines()) == wanted,
        ),
        **figures,
    )
