"""A `tiered run` that is listed as a slave: real name servers and brokers, Java clients that are sent there.

A broker that checks signatures, and `tiered run` as its slave: what it asks in its own name is signed, too, by an
account that is allowed nothing at all. Moving a group takes rights on that group and topic.
"""

import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.server.slave.registration import AGAIN_S as REGISTER_AGAIN_S
from rocketmq_tiered.server.slave.registration import Listing, SlaveConfig, register_command
from tests.integration.client_scene import (
    QUEUES,
    begins_and_ends,
    delete_old_files,
    everything,
    need_clients,
    until,
    wait_for,
)
from tests.integration.slave_scene import SLAVE_ID, Slave, got, standing
from tests.servers.child import ChildServer, free_port_block
from tests.servers.rocketmq import BROKER, CLUSTER, JAVA_OPENS, checking_signatures, judging_permissions
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.remoting.client import BrokerClient, is_refusal
from tiered.remoting.command import RequestCode
from tiered.remoting.credentials import Credentials

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def slave(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[Slave]:
    need_clients("5.3.3")
    with standing("5.3.3", tmp_path_factory.mktemp("slave"), minio_url) as found:
        yield found


def read_all_of_it(slave: Slave) -> None:
    """Pinned clients read from offset 0 what the broker has deleted, equal to what it gave while it had it."""
    before = slave.route()
    ends = begins_and_ends(slave, "live0")[1]
    truth = got(slave.push("G-truth", "live0", sum(ends)))  # from the broker itself
    assert {(int(message[0]), int(message[1])) for message in truth} == everything(ends)
    assert truth.total() == sum(ends)
    slave.sidecar.start()
    slave.wait_until_listed()
    route = slave.route()
    assert route["brokerDatas"][0]["brokerAddrs"] == slave.listed()
    assert route["queueDatas"] == before["queueDatas"]
    assert delete_old_files(slave) > 100
    assert got(slave.pinned("pull", "G-pulled", 0)) == truth
    # Of a group's very first commits a broker may lose all but one, if they arrive at the same time.
    slave.commit("G-pinned", 0, 0)
    before_pulls = slave.pulls()
    assert got(slave.pinned("assign", "G-pinned", 10**6, idle_s=8)) == truth
    # Ten messages a pull, and then eight seconds at the end, where it is not redirected again and again.
    assert slave.pulls() - before_pulls < sum(ends) / 10 + QUEUES * 10
    until(lambda: slave.committed("G-pinned") == ends, "its offsets are not at the master", 20)


def redirect_and_return(slave: Slave) -> None:
    """A consumer that the master finds slow reads here and goes back; the master's ratio is 0, so all are slow."""
    slave.be_listed()
    slave.fill(2000)
    slave.sidecar.wait_until_archived(60)
    slave.create_group("G-slow", SLAVE_ID)
    slave.configure(accessMessageInMemoryMaxRatio=0)
    begins, ends = begins_and_ends(slave, "live1")
    wanted = everything(ends, begins)
    consumer = slave.push("G-slow", "live1", 10**6)
    consumer.wait_for(len(wanted), 60)
    assert slave.answered("G-slow")[0] > 0, slave.status()
    slave.configure(accessMessageInMemoryMaxRatio=40)
    with slave.produce(80, per_second=40) as producer:
        producer.finish(30)  # clients that wait here are redirected by the next message
    wanted = everything(begins_and_ends(slave, "live1")[1], begins)
    consumer.wait_for(len(wanted), 60)
    here = slave.answered("G-slow")
    with slave.produce(200, per_second=50) as producer:
        producer.finish(30)
    wanted = everything(begins_and_ends(slave, "live1")[1], begins)
    consumer.wait_for(len(wanted), 60)
    assert slave.answered("G-slow") == here, "it is back at the master"
    assert Counter(consumer.lines()) == Counter(wanted), "nothing is missing, nothing comes twice"
    consumer.kill()


def come_and_go(slave: Slave) -> None:
    """Name server and sidecar end and come back while a producer sends."""
    mq = slave.broker
    slave.be_listed()
    with slave.produce(10**6, per_second=200) as producer:
        mq.name_server.stop()
        mq.name_server.start()
        until(lambda: str(SLAVE_ID) in slave.listed(), "not listed again", 15)
        until(lambda: "0" in slave.listed(), "the broker does not register again", 60)
        slave.sidecar.kill()
        until(lambda: slave.listed() == {"0": mq.broker_address}, "still listed", 5)
        slave.sidecar.start()
        slave.wait_until_listed()
        assert slave.route()["brokerDatas"][0]["brokerAddrs"]["0"] == mq.broker_address
        sent = producer.finish(30, now=True)
    assert sent.failed == 0 and sent.acked > 500
    slave.sidecar.wait_until_archived(60)
    assert slave.sidecar.stop() == 0, slave.sidecar.log.read_text()[-2000:]
    assert slave.listed() == {"0": mq.broker_address}
    # A killed process may have left unnamed objects.
    for command in (
        ("gc", slave.sidecar.url, "--apply", "--grace", "0s"),
        ("verify", slave.sidecar.url, "--full", "--strict"),
    ):
        done = slave.sidecar.tiered(*command)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_it_is_listed_beside_the_master_and_pinned_clients_read_all_of_it(slave: Slave) -> None:
    read_all_of_it(slave)


def test_a_slow_consumer_is_redirected_and_goes_back(slave: Slave) -> None:
    redirect_and_return(slave)


def test_name_server_and_sidecar_come_and_go_and_producers_do_not_notice(slave: Slave) -> None:
    come_and_go(slave)


def several_name_servers(slave: Slave) -> None:
    """It is listed at both or, beside a broker of another name at its address, at none; one may go and come back."""
    mq, both = slave.broker, slave.broker.name_server_addresses
    master, beside = {"0": mq.broker_address}, {"0": mq.broker_address, str(SLAVE_ID): slave.address}

    def stands() -> dict[str, str]:
        return dict(slave.status().get("nameServers", ()))

    # The broker's first registration may have missed one; the next comes half a minute later.
    until(
        lambda: [slave.listed(at) for at in both] == [master, master], "the broker is not listed at both", 60
    )
    with closing(BrokerClient(both[1], 5)) as other:  # listed for as long as its connection lasts
        command = register_command(SlaveConfig("other-a", "", (), slave.address, 0), Listing(cluster="Other"))
        assert other.call(command.code, dict(command.ext_fields), command.body).code == 0
        slave.sidecar.start()
        slave.sidecar.wait_until_following(60)
        of_other = f"{slave.address} is listed as id 0 of other-a"
        until(lambda: of_other in stands().get(both[1], ""), "it does not say who has its address")
        until(lambda: "another name server" in stands()[both[0]], "it stays at the other one")
        # 5.x answers before it takes who unregisters off its list.
        until(lambda: [slave.listed(at) for at in both] == [master, master], "listed where it is refused", 5)
        assert slave.listed(both[1], "other-a") == {"0": slave.address}
    until(lambda: [slave.listed(at) for at in both] == [beside, beside], "not listed at both", 30)

    mq.name_servers[0].kill()
    until(lambda: stands()[both[0]].startswith("not reachable"), "it does not notice", 15)
    time.sleep(2 * REGISTER_AGAIN_S)
    assert slave.listed(both[1]) == beside and stands()[both[1]] == "registered"
    mq.name_servers[0].start()
    until(lambda: str(SLAVE_ID) in slave.listed(both[0]), "not listed again", 15)
    until(lambda: slave.listed(both[0]) == beside, "the broker does not register again", 60)
    assert slave.sidecar.stop() == 0, slave.sidecar.log.read_text()[-2000:]
    until(lambda: [slave.listed(at) for at in both] == [master, master], "still listed", 5)


@pytest.mark.timeout(120)
def test_it_is_listed_at_all_name_servers_and_unregisters_from_all(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    with standing("5.3.3", tmp_path, minio_url, 0, 0, 2) as slave:
        several_name_servers(slave)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_the_same_beside_other_versions(version: str, tmp_path: Path, minio_url: RunningStore) -> None:
    with standing(version, tmp_path, minio_url) as slave:
        read_all_of_it(slave)
        printed = slave.mqadmin("clusterList")
        assert [line.split()[:4] for line in printed.splitlines() if line.startswith(CLUSTER)] == [
            [CLUSTER, BROKER, "0", slave.broker.broker_address],
            [CLUSTER, BROKER, str(SLAVE_ID), slave.address],
        ]
        assert "brokerVersionDesc" in slave.mqadmin("brokerStatus", "-b", slave.address)
        redirect_and_return(slave)
        come_and_go(slave)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_without_the_master_a_group_reads_on_and_loses_nothing(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    """The master is killed while a redirected group reads. It continues here up to the archive's end. When the master
    is back the group's offsets are true."""
    with standing("5.3.3", tmp_path, minio_url) as slave:
        slave.sidecar.start()
        slave.wait_until_listed()
        slave.fill(40_000, per_second=1500)
        slave.sidecar.wait_until_archived(60)
        slave.create_group("G-alone", SLAVE_ID)
        slave.configure(accessMessageInMemoryMaxRatio=0)
        ends = begins_and_ends(slave, "live0")[1]
        consumer = slave.push("G-alone", "live0", 10**6, pause_ms=20)
        until(
            lambda: len(consumer.lines()) > 2000 and slave.answered("G-alone")[0] > 0,
            "no client came here",
            60,
        )
        slave.broker.broker.kill()
        seen = len(consumer.lines())
        until(lambda: slave.listed() == {str(SLAVE_ID): slave.address}, "the master is still listed", 30)
        wanted = everything(ends)
        consumer.wait_for_all(wanted, 120)
        assert seen < len(wanted) / 2
        time.sleep(5)  # at the archive's end, with nothing to read
        slave.broker.broker.start()
        until(lambda: "0" in slave.listed(), "the master is not listed again", 30)
        with slave.produce(400, per_second=100) as producer:
            assert producer.finish(60).failed == 0
        ends = begins_and_ends(slave, "live0")[1]
        wanted = everything(ends)
        consumer.wait_for_all(wanted, 120)
        assert set(consumer.lines()) == wanted
        until(lambda: slave.committed("G-alone") == ends, "its offsets do not come to the master", 60)
        consumer.kill()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_it_stays_out_of_a_cluster_with_acting_masters(tmp_path: Path, minio_url: RunningStore) -> None:
    with standing("5.3.3", tmp_path, minio_url, 0, enableSlaveActingMaster="true") as slave:
        slave.sidecar.start()
        slave.sidecar.wait_until_following(60)

        def printed() -> str:
            return str(slave.status()["nameServers"])

        until(lambda: "enableSlaveActingMaster" in printed(), "it does not say why it stays out")
        until(slave.listed, "the name server, slow to begin, does not list the master", 60)
        assert slave.listed() == {"0": slave.broker.broker_address}


@pytest.fixture(params=["4.9.7", "5.3.3", "5.5.0"])
def replicated(request: pytest.FixtureRequest, tmp_path: Path, minio_url: RunningStore) -> Iterator[Slave]:
    """A SYNC_MASTER with a real slave, and ours."""
    version = str(request.param)
    port = free_port_block(6)
    with standing(version, tmp_path, minio_url, 0, brokerRole="SYNC_MASTER", inSyncReplicas=2) as found:
        mq, directory = found.broker, tmp_path / "real-slave"
        (directory / "conf").mkdir(parents=True)
        (directory / "conf" / "logback_broker.xml").write_text("<configuration/>")
        conf = {
            "brokerClusterName": CLUSTER,
            "brokerName": BROKER,
            "brokerId": 1,
            "brokerRole": "SLAVE",
            "brokerIP1": "127.0.0.1",
            "listenPort": port + 4,
            "haListenPort": port + 5,
            "namesrvAddr": mq.name_server_address,
            "mappedFileSizeCommitLog": 1 << 20,
            "mappedFileSizeConsumeQueue": 20 * 200,
            "storePathRootDir": directory / "store",
            "storePathCommitLog": directory / "store" / "commitlog",
        }
        (directory / "broker.conf").write_text("".join(f"{name}={value}\n" for name, value in conf.items()))
        log = directory / "out"
        server = ChildServer(
            "slave broker",
            [
                "java",
                "-Xmx512m",
                *JAVA_OPENS,
                f"-Duser.home={directory}",
                "-cp",
                f"{mq.jars}/*",
                "org.apache.rocketmq.broker.BrokerStartup",
                "-c",
                str(directory / "broker.conf"),
            ],
            {"ROCKETMQ_HOME": str(directory)},
            log,
            lambda: b"boot success" in log.read_bytes(),
        )
        with server:
            until(lambda: "1" in found.listed(), "the real slave is not listed", 60)
            until(lambda: is_replicated(found), "the real slave does not follow", 180)
            yield found


def is_replicated(slave: Slave) -> bool:
    """Whether sends are acknowledged: the real slave follows."""
    with slave.produce(100, per_second=40) as producer:
        return producer.finish(60).acked == 100


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_producers_of_a_sync_master_do_not_notice(replicated: Slave) -> None:
    """Sends wait for the real slave; ours acknowledges nothing and takes no part, listed or killed."""
    slave = replicated
    with slave.produce(10**6, per_second=300) as producer:
        time.sleep(15)
        without = producer.p99_us_by_second()[5:]
        slave.sidecar.start()
        until(lambda: str(SLAVE_ID) in slave.listed(), "not listed")
        at = len(producer.p99_us_by_second())
        time.sleep(15)
        beside = producer.p99_us_by_second()[at + 5 :]
        slave.sidecar.kill()
        until(lambda: str(SLAVE_ID) not in slave.listed(), "still listed", 5)
        at = len(producer.p99_us_by_second())
        time.sleep(10)
        killed = producer.p99_us_by_second()[at:]
        sent = producer.finish(30, now=True)
    figures = [int(np.median(seconds)) for seconds in (without, beside, killed)]
    print(f"{slave.broker.version}: {sent}, median p99 of a second in us without, beside, killed: {figures}")
    assert sent.failed == 0 and sent.acked >= sent.sends, "each is stored twice when it is acknowledged"
    assert set(slave.listed()) == {"0", "1"}
    # Sends take milliseconds; who waits for a replica that never acknowledges waits three seconds.
    assert max(figures[1:]) < 1_000_000


VERSIONS = ["5.3.3", pytest.param("4.9.7", marks=pytest.mark.soak)]
CLIENT = Credentials("the-clients", "a secret of theirs")
OWN = Credentials("the-sidecar", "its own secret")
TOOLS_YML = 'accessKey: {0.access_key}\nsecretKey: "{0.secret_key}"\n'
GROUP = "G-pinned"
PLAIN_ACL = f"""globalWhiteRemoteAddresses:
accounts:
- {{accessKey: {CLIENT.access_key}, secretKey: "{CLIENT.secret_key}", admin: true}}
- {{accessKey: {OWN.access_key}, secretKey: "{OWN.secret_key}", defaultTopicPerm: DENY, defaultGroupPerm: DENY}}
"""


@pytest.fixture(params=VERSIONS)
def guarded_slave(
    request: pytest.FixtureRequest, tmp_path: Path, minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slave]:
    """Beside a broker that was filled before it began to check; what tests ask it is signed."""
    need_clients(request.param)
    with standing(request.param, tmp_path, minio_url, messages=800) as found:
        (tmp_path / "mq" / "conf" / "plain_acl.yml").write_text(PLAIN_ACL)
        checks = checking_signatures(request.param, CLIENT.access_key, CLIENT.secret_key)
        found.broker.restart_with(checks | judging_permissions(request.param))
        add_account(found)
        rules = tmp_path / "rules.yml"
        rules.write_text(PLAIN_ACL)
        rules.chmod(0o600)
        found.sidecar.settings = {**found.sidecar.settings, "TIERED_SERVE__ACL_FILE": rules}
        for user in ("client_scene", "live"):
            monkeypatch.setattr(
                f"tests.integration.{user}.BrokerClient", partial(BrokerClient, credentials=CLIENT)
            )
        yield found


def add_account(guarded_slave: Slave) -> None:
    """The sidecar's, of a user who is not Super; 4.9 has it from plain_acl.yml."""
    (guarded_slave.directory / "conf").mkdir(exist_ok=True)
    (guarded_slave.directory / "conf" / "tools.yml").write_text(TOOLS_YML.format(CLIENT))
    if guarded_slave.broker.version.startswith("5"):
        words = ("createUser", "-c", CLUSTER, "-u", OWN.access_key, "-p", OWN.secret_key, "-t", "Normal")
        until(lambda: "success" in guarded_slave.mqadmin(*words), "no account for the sidecar")


def allow_moving(guarded_slave: Slave) -> None:
    """Give the sidecar's account what moving the group takes."""
    if guarded_slave.broker.version.startswith("5"):
        words = f"-c {CLUSTER} -s User:{OWN.access_key} -r Topic:live0,Group:{GROUP} -a Get,Update -d Allow"
        assert "success" in guarded_slave.mqadmin("createAcl", *words.split())
        return
    perms = f"topicPerms: [live0=SUB], groupPerms: [{GROUP}=SUB]"
    text = PLAIN_ACL.replace("defaultGroupPerm: DENY}", f"defaultGroupPerm: DENY, {perms}}}")
    (guarded_slave.directory / "mq" / "conf" / "plain_acl.yml").write_text(text)


def moved(guarded_slave: Slave, account: Path) -> subprocess.CompletedProcess[str]:
    """`tiered reset-offset` of the group to the broker's first messages, by the sidecar's account."""
    return guarded_slave.sidecar.tiered(
        "reset-offset",
        "--serve",
        guarded_slave.broker.name_server_address,
        "--group",
        GROUP,
        "--topic",
        "live0",
        "--earliest",
        "--set",
        f"broker.credentials_file={account}",
    )


def test_an_acl_enabled_broker_is_followed_and_relieved(guarded_slave: Slave, tmp_path: Path) -> None:
    sidecar = guarded_slave.sidecar
    sidecar.start()
    wait_for(sidecar.log, "broker.credentials_file")
    assert "refuses to report its offsets" in sidecar.log.read_text()
    assert sidecar.stop() == 0
    assert load(sidecar.open_archive()).cursor.phys == 0, "it does not know how far the log may be read"
    account = tmp_path / "tools.yml"
    account.write_text(TOOLS_YML.format(OWN))
    sidecar.settings = {**sidecar.settings, "TIERED_BROKER__CREDENTIALS_FILE": account}
    sidecar.start()
    guarded_slave.wait_until_listed()
    sidecar.wait_until_archived(60)
    ends = begins_and_ends(guarded_slave, "live0")[1]
    signs = (f"-Dacl.key={CLIENT.access_key}", f"-Dacl.secret={CLIENT.secret_key}")
    assert set(guarded_slave.pinned("pull", "G-pulled", 0, flags=signs).finish()) == everything(ends)
    assigned = guarded_slave.pinned("assign", GROUP, 10**6, idle_s=60, flags=signs)
    assigned.wait_for_all(everything(ends))
    until(lambda: guarded_slave.answered(GROUP)[0] > 0, "not from the archive, or no heartbeat", 45)
    until(lambda: guarded_slave.committed(GROUP) == ends, "the offsets did not reach the master", 20)
    assigned.kill()
    assert sorted(assigned.lines()) == sorted(everything(ends))
    stranger = BrokerClient(guarded_slave.address, 5)
    answer = stranger.call(
        RequestCode.PULL_MESSAGE,
        {
            "consumerGroup": "G-other",
            "topic": "live0",
            "queueId": "0",
            "queueOffset": "0",
            "maxMsgNums": "32",
            "sysFlag": "4",
            "subscription": "*",
            "expressionType": "TAG",
            "commitOffset": "0",
            "subVersion": "0",
            "suspendTimeoutMillis": "0",
        },
    )
    assert is_refusal(answer) and not answer.body, answer
    stranger.close()
    assert moved(guarded_slave, account).returncode == 4, "it is allowed nothing"
    allow_moving(guarded_slave)
    until(lambda: moved(guarded_slave, account).returncode == 0, "not moved", 20)
    assert guarded_slave.committed(GROUP) == begins_and_ends(guarded_slave, "live0")[0]
    assert OWN.secret_key not in sidecar.log.read_text()
