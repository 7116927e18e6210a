"""Beside a live broker: other read policies and restarts of groups while consumers read."""

import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.integration.client_scene import all_there_is, delete_old_files, need_clients, wait_for
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def tiered_proxy(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[ProxyScene]:
    need_clients("5.3.3")
    config = {"cleanResourceInterval": 1000}
    with proxy_beside_broker(tmp_path_factory.mktemp("operations"), minio_url, config, {}) as found:
        found.fill(4000, 500)
        found.wait_until_serving()
        delete_old_files(found)
        yield found


def reload(tiered_proxy: ProxyScene, settings: str, times: int) -> None:
    """Other settings are in force, for the ``times``-th time."""
    tiered_proxy.settings_file.write_text(settings)
    assert tiered_proxy.sidecar.process is not None
    tiered_proxy.sidecar.process.send_signal(signal.SIGHUP)
    wait_for(tiered_proxy.sidecar.log, '"settings reloaded"', times)


def pulls(tiered_proxy: ProxyScene, group: str) -> tuple[int, int]:
    """Answered with messages by the archive, by the broker."""
    (found,) = [found for found in tiered_proxy.sidecar.status()["proxy"]["groups"] if found["name"] == group]
    return found["archivePulls"], found["brokerPulls"]


def test_a_reload_while_groups_read_costs_nothing(tiered_proxy: ProxyScene) -> None:
    tiered_proxy.sidecar.wait_until_archived(60)
    before = all_there_is(tiered_proxy, "live0")
    consumer = tiered_proxy.consume("push", "G-reload", 10**6, idle_s=120)
    consumer.wait_for_all(before)
    assert min(pulls(tiered_proxy, "G-reload")) > 0, "the archive, then the broker"
    reload(tiered_proxy, '[read]\npolicy = "FORCE"\n', 1)
    forced = tiered_proxy.consume("push", "G-forced", 10**6, idle_s=120)
    forced.wait_for_all(before)
    assert pulls(tiered_proxy, "G-forced")[1] == 0, "the archive answers what the broker has"
    with tiered_proxy.produce(10**6, per_second=200) as producer:
        consumer.wait_for(len(before) + 300)
        rule = '[[topics.rules]]\npattern = "live1"\nread_policy = "DISABLE"\n'
        reload(tiered_proxy, f'{rule}[read]\npolicy = "FORCE"\n', 2)
        consumer.wait_for(len(before) + 600)
        reload(tiered_proxy, "", 3)
        consumer.wait_for(len(before) + 900)
        producer.finish(60, now=True)
    wanted = all_there_is(tiered_proxy, "live0")
    for group in (consumer, forced):
        group.wait_for_all(wanted)
        group.kill()
        assert Counter(group.lines()) == Counter(wanted)


def test_a_running_group_is_reset(tiered_proxy: ProxyScene) -> None:
    """A client that gets a reset sleeps for 10 s, and looks at its queues every 20 s."""
    wanted = all_there_is(tiered_proxy, "live0")
    consumer = tiered_proxy.consume("push", "G-replay", 10**6, idle_s=120)
    consumer.wait_for_all(wanted)
    for times, arguments in enumerate((["--earliest"], ["--offset", "3"]), 2):
        done = tiered_proxy.sidecar.tiered(
            "reset-offset",
            "--serve",
            tiered_proxy.address,
            "--group",
            "G-replay",
            "--topic",
            "live0",
            *arguments,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        first = 0 if "--earliest" in arguments else 3
        consumer.wait_for(len(wanted) * times - 4 * first, 60)
    consumer.kill()
    found = Counter(consumer.lines())
    assert set(found) == wanted
    assert all(count >= (3 if offset >= 3 else 2) for (_, offset), count in found.items())
