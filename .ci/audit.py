"""Look up the locked versions in a database of known vulnerabilities, with the locked pip-audit.

Exits non-zero if a version has one. Where no vulnerability service answers, prints one line that begins with SKIPPED
and exits with 0. Always asks OSV: of versions that a mirror of the package index does not describe, the index's own
service reports no vulnerability.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCKS = ("requirements.lock", "requirements-docs.lock", "requirements-audit.lock")
"""The others are parts of the first one."""
TIMEOUT_S = 120
_NO_SERVICE = re.compile(
    r"\b(\w*ConnectionError|\w*Timeout\w*|SSLError|ProxyError|\w*ServiceError|HTTPError)\b"
)
"""Exceptions of pip-audit when the service gives no answer, or an error."""


def main(arguments: list[str]) -> int:
    """Audit all locks; ``arguments`` are pip-audit's, such as ``--osv-url``. Returns the exit code."""
    known = 0
    for lock in LOCKS:
        done = audit(lock, arguments)
        if done is None:
            return skipped("locked versions", f"no answer within {TIMEOUT_S} s")
        if not done.stdout.strip():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            found = _NO_SERVICE.search(last)
            if found is None:
                print(done.stderr, file=sys.stderr)
                return 1
            return skipped("locked versions", f"no vulnerability service is reachable ({found[1]})")
        known += report(lock, json.loads(done.stdout)["dependencies"])
    return int(known > 0)


def audit(lock: str, arguments: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run pip-audit on one file; None after the time limit."""
    command = [
        Path(sys.executable).parent / "pip-audit",
        "--vulnerability-service",
        "osv",
        "--format",
        "json",
        "--disable-pip",
        "--require-hashes",
        "--progress-spinner",
        "off",
        *arguments,
        "--requirement",
        ROOT / lock,
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None


def report(lock: str, dependencies: list[dict[str, Any]]) -> int:
    """Print what is known of a file's versions; returns the number of vulnerabilities."""
    known = 0
    for one in dependencies:
        if "skip_reason" in one:
            skipped(one["name"], one["skip_reason"])
        for found in one.get("vulns", ()):
            known += 1
            fixed = ", ".join(found["fix_versions"]) or "no version yet"
            print(f"{lock}: {one['name']} {one['version']}: {found['id']}, fixed in {fixed}")
    print(f"{lock}: {len(dependencies)} versions looked up, {known} known vulnerabilities")
    return known


def skipped(what: str, reason: str) -> int:
    """Print the line that .ci/run repeats in its summary."""
    print(f"SKIPPED audit of {what}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
