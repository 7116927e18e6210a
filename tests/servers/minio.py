"""MinIO, the reference among the S3 servers: checks secrets, checksums and conditions as AWS does."""

from pathlib import Path
from secrets import token_hex

from tests.servers.child import ChildServer, answers, free_port
from tests.servers.install import minio_binary
from tests.servers.running_store import RunningStore


def start_minio(
    directory: Path,
    *,
    port: int | None = None,
    certificates: Path | None = None,
    region: str = "",
    secrets: Path | None = None,
) -> RunningStore:
    """A MinIO over ``directory`` with a password of its own.

    ``certificates``: a directory with public.crt and private.key; then it speaks TLS. ``region``: the only one it
    accepts; otherwise any will do. ``secrets``: a directory with the owner's name and password, minio_user and
    minio_password; otherwise the password is drawn.
    """
    port = port or free_port()
    scheme = "http" if certificates is None else "https"
    if secrets is None:
        user, password = "tiered-test", token_hex(16)
        owner = {"MINIO_ROOT_USER": user, "MINIO_ROOT_PASSWORD": password}
    else:
        files = secrets / "minio_user", secrets / "minio_password"
        user, password = (path.read_text("utf-8").strip() for path in files)
        owner = {"MINIO_ROOT_USER_FILE": str(files[0]), "MINIO_ROOT_PASSWORD_FILE": str(files[1])}
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    server = ChildServer(
        "MinIO",
        [
            str(minio_binary()),
            "server",
            "--address",
            f"127.0.0.1:{port}",
            "--quiet",
            *(() if certificates is None else ("--certs-dir", str(certificates))),
            str(data),
        ],
        {
            **({"MINIO_SITE_REGION": region} if region else {}),
            **owner,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_CI_CD": "1",
        },
        directory / "minio.log",
        lambda: answers(f"{scheme}://127.0.0.1:{port}/minio/health/ready"),
    )
    server.start()
    return RunningStore("MinIO", f"{scheme}://127.0.0.1:{port}", user, password, server)
