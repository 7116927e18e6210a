"""A compaction topic of a live broker through its own rounds and the expiry of its commitlog: broker, proxy mode and
archive mode give the same view."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.client_scene import ClientScene, ask, beside_clients, need_clients, until, wait_for
from tests.integration.keyed_live import KEYED, Keyed, Reader, compacting_broker, expected, pulled
from tests.integration.live import Sidecar
from tests.integration.live_scene import Scene
from tests.servers.child import free_port
from tests.servers.store_directory import StoreDirectory
from tests.servers.tiered_serve import tiered_serve
from tiered.remoting.codes import RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    """A broker with a compaction topic, and a sidecar that is not started; its proxy at ``scene.address``."""
    need_clients("5.3.3")
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "TIERED_SERVE__BIND": address,
        "TIERED_SERVE__ADVERTISE": address,
        "TIERED_READ__POLICY": "FORCE",
        "TIERED_OFFLOAD__BATCH_AGE_MS": 300,
    }
    scene = Scene(topics=1, config=compacting_broker(), settings=settings)
    with beside_clients(
        scene,
        tmp_path,
        StoreDirectory(tmp_path / "objects"),
        lambda sidecar: ClientScene(sidecar, address, scene, tmp_path),
    ) as clients:
        found = Keyed(clients)
        found.create()
        yield found


def compact_keys(keyed: Keyed, cut: int) -> int:
    """A round of the archive after one with ``cut``; its cut."""
    done = keyed.scene.sidecar.tiered(
        "compact-keys", keyed.scene.sidecar.url, "--apply", "--older-than", "0", "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rounds"] == 1
    return keyed.kept(cut)[document["messages"]]


def check_views(keyed: Keyed, archive: str, cut: int, *, is_expired: bool = False) -> int:
    """``cut``: of the archive's last round. Of the broker's cuts, the one that it has at the end."""
    check_server(keyed, archive, cut, minimum=0)
    while True:
        brokers = keyed.compacted_by_broker()
        try:
            for address in (keyed.scene.broker.broker_address, keyed.scene.address):
                # A broker's minimum is that of its commitlog, though its pulls begin before it.
                check_server(keyed, address, brokers, minimum=len(keyed.sent) if is_expired else 0)
        except AssertionError:
            if brokers == keyed.compacted_by_broker():
                raise
        else:
            return brokers


def check_server(keyed: Keyed, address: str, cut: int, minimum: int) -> None:
    """It gives the view of all messages, and replies to pulls at every edge as a broker with ``cut``."""
    end, kept = len(keyed.sent), keyed.kept(cut)
    until(
        lambda: set(pulled(address, 0, 32)[0].offsets) <= set(kept), "a server shows what a round dropped", 10
    )
    assert Reader().read(address, kept).view == keyed.view
    for offset in (0, kept[0] - 1, kept[0], kept[3] + 1, cut - 1, cut, end - 1, end, end + 1, end + 100):
        reply, wanted = pulled(address, offset)[0], expected(kept, end, offset)
        if reply.offsets:  # a broker's reply ends with a file
            shown = wanted.offsets[: len(reply.offsets)]
            wanted = wanted._replace(offsets=shown, following=shown[-1] + 1)
        assert reply == wanted, (address, offset)
    offsets = [
        int(ask(address, code, topic=KEYED, queueId=0).ext_fields["offset"])
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    ]
    assert offsets == [minimum, end]


def test_broker_proxy_and_archive_give_the_same_view(keyed: Keyed, tmp_path: Path) -> None:
    sidecar = keyed.scene.sidecar
    sidecar.start()
    wait_for(sidecar.log, '"archive open for clients"')
    archive, address = None, ""
    cuts = 0, 0
    lagging: list[Reader] = []
    try:
        for keys in (range(30), range(20, 60)):
            for _ in range(4):
                keyed.send(100, keys)
                sidecar.wait_until_archived(60)
            if archive is None:
                archive, address = tiered_serve(sidecar.url, tmp_path)
                archive.start()
            servers = [keyed.scene.broker.broker_address, keyed.scene.address, address]
            everything = range(len(keyed.sent))  # what rounds leave is checked once they ended
            lagging += [Reader().read(server, everything, 150) for server in servers]
            lagging = [one.read(servers[at % 3], everything, 40) for at, one in enumerate(lagging, 1)]
            keyed.wait_for_round(cuts[0] + 200)
            cut = compact_keys(keyed, cuts[1])
            cuts = check_views(keyed, address, cut), cut
        keyed.expire_commitlog()
        cuts = check_views(keyed, address, cuts[1], is_expired=True), cuts[1]
        for at, one in enumerate(lagging):
            one.read(servers[at % 3], keyed.kept(cuts[at % 3 == 2]))
            late = {key for key in one.view if key not in keyed.view}
            assert {key: found for key, found in one.view.items() if key not in late} == keyed.view
            # They stopped between a value and its tombstone, which went before they read on: min_age_ms is for these.
            assert all(one.view[key][0] < keyed.latest[key][0] < max(cuts) for key in late)
    finally:
        if archive is not None:
            archive.stop()
    finish(sidecar)


def test_an_archive_that_began_late_gets_its_begin_from_the_broker(keyed: Keyed, tmp_path: Path) -> None:
    sidecar = keyed.scene.sidecar
    keyed.send(300, range(50))
    keyed.wait_for_round(200)
    keyed.expire_commitlog()
    sidecar.start()
    sidecar.wait_until_following(60)
    for _ in range(3):
        keyed.send(40, range(30, 70))
        sidecar.wait_until_archived(60)
    command = (
        "compact-keys",
        sidecar.url,
        "--older-than",
        "0",
        "--from-broker",
        keyed.scene.broker.broker_address,
    )
    dry = sidecar.tiered(*command)
    assert dry.returncode == 0 and "dry run, add --apply to copy" in dry.stdout, dry.stdout + dry.stderr
    done = sidecar.tiered(*command, "--apply", "--json")
    assert done.returncode == 0, done.stderr
    copied = json.loads(done.stdout)["copied"]
    assert 5 < copied["messages"] < 50 and copied["queues"] == 1
    again = sidecar.tiered(*command, "--apply")
    assert "nothing to copy" in again.stdout, again.stdout + again.stderr
    keyed.send(40, range(30, 70))
    sidecar.wait_until_archived(60)
    archive, address = tiered_serve(sidecar.url, tmp_path)
    archive.start()
    try:
        assert Reader().read(address, range(len(keyed.sent))).view == keyed.view
        assert pulled(address, 0)[0].minimum < 300
    finally:
        archive.stop()
    finish(sidecar)


def finish(sidecar: Sidecar) -> None:
    """Nothing is damaged or left over."""
    assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]
    for command in (
        ("gc", sidecar.url, "--apply", "--grace", "0s"),
        ("verify", sidecar.url, "--full", "--strict"),
    ):
        done = sidecar.tiered(*command)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
