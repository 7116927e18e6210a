"""Real Java clients with right, wrong and no keys, plain and over TLS, with and without a certificate of their own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rocketmq_tiered
from tests.end_to_end.offloading import backfill
from tests.servers.child import ChildServer, free_port, listens
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import java_classes, run_java
from tiered.object_store.file import FileStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ("4.9.7", "5.3.3", "5.5.0")
KEY, SECRET = "reader-key", "a secret of the reader"
TOPIC = "t_keys"
RULES = {
    "plain": f"""
accounts:
- accessKey: {KEY}
  secretKey: {SECRET}
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms: [{TOPIC}=SUB]
""",
    "users": f"""
users: [{{username: {KEY}, password: {SECRET}, userType: Normal}}]
acls:
- subject: User:{KEY}
  policies:
  - entries:
    - {{resource: "Topic:{TOPIC}", actions: [Sub], decision: Allow}}
    - {{resource: "Group:*", actions: [Sub], decision: Allow}}
""",
}


@dataclass
class Guarded:
    """`tiered serve` with rules and TLS, client certificates not required."""

    directory: Path
    address: str
    rules: Path
    log: Path
    messages: int

    def pull(self, version: str, *key: str, topic: str = TOPIC, flags: tuple[str, ...] = ()) -> str:
        """What the Java client says of it."""
        found = run_java(
            version, self.directory, "SignedPull", self.address, "G_signed", topic, *key, flags=flags
        )
        words = ("pulled", "refused", "failed")
        return next(line for line in found.splitlines() if line.startswith(words))


@pytest.fixture(scope="module")
def guarded(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    try:
        for version in VERSIONS:
            java_classes(version)
    except NotInstallableError as error:
        pytest.skip(f"Java clients: {error}")
    directory = tmp_path_factory.mktemp("guarded")
    backfill(real_store("A") / "store", FileStore(directory / "archive"))
    url = f"file://{directory}/archive"
    with rocketmq_tiered.open(url) as archive:
        messages = sum(queue.max_offset - queue.min_offset for queue in archive.queues(TOPIC))
    make_certificates(directory)
    port = free_port()
    rules = directory / "rules.yml"
    rules.write_text(RULES["plain"])
    places = {
        "acl_file": rules,
        "tls_certificate": directory / "server.pem",
        "tls_key": directory / "server.key",
        "tls_client_ca": directory / "ca.pem",
        "tls_client_required": "false",
    }
    settings = [word for name, value in places.items() for word in ("--set", f"serve.{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.cli",
        "serve",
        url,
        "--bind",
        f"127.0.0.1:{port}",
        "--set",
        "admin.port=0",
        *settings,
    ]
    root = {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    server = ChildServer("tiered serve", command, root, directory / "serve.log", lambda: listens(port))
    with server:
        yield Guarded(directory, f"127.0.0.1:{port}", rules, directory / "serve.log", messages)
    assert '"group":"G_signed","topic":"t_keys"' in (directory / "serve.log").read_text(), "reads are audited"


def make_certificates(directory: Path) -> None:
    """A CA, a server and a client of it, PEM; Java wants keys in PKCS#8."""

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=directory, check=True, capture_output=True)

    openssl("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem")
    for name in ("server", "client"):
        openssl(f"req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr")
        openssl(f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out {name}.pem")


@pytest.mark.parametrize("version", VERSIONS)
def test_only_the_right_key_reads(guarded: Guarded, version: str) -> None:
    assert guarded.pull(version, KEY, SECRET) == f"pulled {guarded.messages}"
    assert guarded.pull(version, KEY, "a wrong secret").startswith(("refused 16", "failed"))
    assert guarded.pull(version).startswith(("refused 16", "failed"))
    assert guarded.pull(version, KEY, SECRET, topic="t_order").startswith(("refused 16", "failed"))
    assert SECRET not in guarded.log.read_text()


def test_rules_of_5_take_the_place_of_the_old_ones_while_serving(guarded: Guarded) -> None:
    guarded.rules.write_text(RULES["users"])
    try:
        assert guarded.pull("5.3.3", KEY, SECRET) == f"pulled {guarded.messages}"
        assert not guarded.pull("5.3.3", KEY, SECRET, topic="t_order").startswith("pulled")
    finally:
        guarded.rules.write_text(RULES["plain"])
    assert '"access rules reloaded"' in guarded.log.read_text()


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
def test_tls_with_and_without_a_client_certificate(guarded: Guarded, version: str) -> None:
    assert guarded.pull(version, KEY, SECRET, flags=("-Dtls.enable=true",)) == f"pulled {guarded.messages}"
    (guarded.directory / "tls.properties").write_text(
        f"tls.test.mode.enable=false\ntls.client.certPath={guarded.directory}/client.pem\n"
        f"tls.client.keyPath={guarded.directory}/client.key\ntls.client.authServer=true\n"
        f"tls.client.trustCertPath={guarded.directory}/ca.pem\n"
    )
    own = ("-Dtls.enable=true", f"-Dtls.config.file={guarded.directory}/tls.properties")
    assert guarded.pull(version, KEY, SECRET, flags=own) == f"pulled {guarded.messages}"
