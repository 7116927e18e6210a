"""`make audit`: what it says of a vulnerable version, of none, and of a service that does not answer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.servers.child import free_port

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "audit-venv" / "bin" / "python"
KNOWN = {
    "id": "PYSEC-0000-1",
    "summary": "made up",
    "affected": [
        {
            "package": {"name": "boto3", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
        }
    ],
}


@pytest.fixture
def service() -> Iterator[ThreadingHTTPServer]:
    """An OSV service that knows what its ``known`` says, by package."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = server.known.get(asked["package"]["name"])  # type: ignore[attr-defined]
            body = json.dumps({"vulns": [found]} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.known = {}  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def audit(url: str) -> subprocess.CompletedProcess[str]:
    """Run the audit against a service."""
    if not PYTHON.exists():
        pytest.skip("the audit's tools are not installed: make audit")
    command = [str(PYTHON), ".ci/audit.py", "--osv-url", url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.integration
def test_a_vulnerable_version_fails_and_is_named(service: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{service.server_port}/v1/query"
    done = audit(url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 known vulnerabilities") == 3 and "SKIPPED" not in done.stdout
    service.known = {"boto3": KNOWN}  # type: ignore[attr-defined]
    done = audit(url)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PYSEC-0000-1, fixed in 99.0" in done.stdout


@pytest.mark.integration
def test_a_service_that_is_away_skips_by_name() -> None:
    done = audit(f"http://127.0.0.1:{free_port()}/v1/query")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("SKIPPED audit of locked versions: no vulnerability service is reachable")
