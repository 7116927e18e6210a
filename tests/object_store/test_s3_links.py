"""The ways to a server: TLS with a certificate of one's own, an environment's proxy, another region."""

import datetime
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.servers.install import NotInstallableError
from tests.servers.minio import start_minio
from tests.servers.proxy import FaultProxy
from tests.servers.running_store import RunningStore
from tiered.errors import AlreadyExistsError, RefusedRequestError, UnansweredError
from tiered.object_store.abandonment import Abandonment, abandonable
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_async_store, open_store
from tiered.settings.sections import ObjectStoreSettings

pytestmark = pytest.mark.integration
MIB = 1024 * 1024


def make_certificate(directory: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, as MinIO wants it. Returns public.crt."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tiered test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    (directory / "private.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (directory / "public.crt").write_bytes(certificate.public_bytes(pem))
    return directory / "public.crt"


def _started(directory: Path, **how: object) -> Iterator[RunningStore]:
    try:
        running = start_minio(directory, **how)  # type: ignore[arg-type]
    except NotInstallableError as error:
        pytest.skip(f"MinIO is not available: {error}")
    yield running
    running.server.stop()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_minio(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[RunningStore]:
    yield from _started(tmp_path_factory.mktemp("minio-tls"), certificates=certificate.parent)


@pytest.fixture(scope="module")
def regional_minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    yield from _started(tmp_path_factory.mktemp("minio-region"), region="eu-west-3")


def test_tls(tls_minio: RunningStore, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    store = open_store(tls_minio.fresh_bucket(), tls_minio.options())
    pieces = [b"small", bytes(3 * MIB), b"x" * 70_000]
    store.put_if_absent("k", pieces)
    assert store.get("k") == b"".join(pieces)
    store.close()


def test_an_abandoned_put_ends_at_once_with_tls_too(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that shakes hands and then says nothing."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, certificate.with_name("private.key"))
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        shaken = pool.submit(lambda: server.wrap_socket(listening.accept()[0], server_side=True))
        settings = ObjectStoreSettings(
            endpoint_url=f"https://127.0.0.1:{listening.getsockname()[1]}", region="us-east-1"
        )
        store = open_store("s3://bucket", StoreOptions(settings=settings))
        abandonment = Abandonment()
        began_s: list[float] = []

        def abandon_soon(_shaken: object) -> None:
            """From the handshake on: loading the SDK may take as long."""
            began_s.append(time.monotonic())
            Timer(0.5, abandonment.cancel).start()

        shaken.add_done_callback(abandon_soon)
        with abandonable(abandonment), pytest.raises(UnansweredError):
            store.put_if_absent("k", [b"x"], timeout_s=30)
        assert 0.5 <= time.monotonic() - began_s[0] < 5
        shaken.result().close()
        store.close()


def test_untrusted_certificate(tls_minio: RunningStore) -> None:
    store = open_store("s3://bucket", tls_minio.options())
    with pytest.raises(RefusedRequestError, match="certificate is not trusted; set AWS_CA_BUNDLE"):
        store.put_if_absent("k", [b"x"])
    store.close()


async def test_tls_asynchronously(
    tls_minio: RunningStore, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    url = tls_minio.fresh_bucket()
    store = open_store(url, tls_minio.options())
    store.put_if_absent("k", [bytes(MIB)])
    store.close()
    reading = open_async_store(url, tls_minio.options())
    assert await reading.get("k") == bytes(MIB)
    await reading.close()


def test_proxy_of_the_environment(minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    url = minio_url.fresh_bucket()
    with FaultProxy(minio_url.endpoint) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("no_proxy", "")
        store = open_store(url, minio_url.options())
        store.put_if_absent("k", [b"through the proxy"])
        assert store.get("k") == b"through the proxy"
        assert [seen.method for seen in proxy.requests] == ["PUT", "GET"]
        store.close()


def test_wrong_region_is_corrected_by_the_answer(regional_minio: RunningStore) -> None:
    bucket = "s3://in-another-region"
    owner = open_store(bucket, regional_minio.options(region="eu-west-3"))
    client = regional_minio.client("eu-west-3")
    client.create_bucket(
        Bucket="in-another-region", CreateBucketConfiguration={"LocationConstraint": "eu-west-3"}
    )
    client.close()
    owner.put_if_absent("k", [b"x"])
    with FaultProxy(regional_minio.endpoint) as proxy:
        misled = replace(regional_minio, endpoint=proxy.endpoint).options(region="us-west-2")
        stranger = open_store(bucket, misled)
        stranger.put_if_absent("l", [b"large" * MIB, b"y"])
        with pytest.raises(AlreadyExistsError):
            stranger.put_if_absent("k", [b"z"])
        puts = [(seen.path.rpartition("/")[2], seen.status) for seen in proxy.log_of("PUT")]
        stranger.close()
    assert puts == [("l", 400), ("l", 200), ("k", 412)], "refused without effect, then right ever after"
    assert owner.get("l") == b"large" * MIB + b"y"
    owner.close()
