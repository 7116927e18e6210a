"""Sets up all that tests run against before they do: ``python -m tests.servers.prepare``.

On a fresh machine this takes minutes, which no single test's time limit should have to hold. What cannot be had is
said, with the reason, and is no error: the tests that need it are skipped by that name. Owns what there is to set up.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.servers.go_client import go_consumer
from tests.servers.install import (
    NotInstallableError,
    build_promtool,
    compose_validator,
    forget_failures,
    helm_binary,
    kubernetes_api,
    localstack_python,
    mc_binary,
    minio_binary,
)
from tests.servers.rocketmq import java_classes
from tests.servers.rocketmq_proxy import grpc_programs, proxy_jars

ROCKETMQ_VERSIONS = ("4.9.7", "5.3.3", "5.5.0")
TIMEOUT_S = 900

Installer = Callable[[float], object]
"""Given the seconds that one command of it may take."""

LINES: tuple[tuple[tuple[str, Installer], ...], ...] = (
    (
        ("MinIO", minio_binary),
        ("MinIO's client", mc_binary),
        ("compose-go", compose_validator),
        ("RocketMQ's Go client", go_consumer),
        ("Helm", helm_binary),
        ("Kubernetes' API", kubernetes_api),
        ("promtool", build_promtool),
    ),
    (
        *((f"RocketMQ {version}", partial(java_classes, version)) for version in ROCKETMQ_VERSIONS),
        ("RocketMQ's proxy", proxy_jars),
        ("RocketMQ's gRPC client", grpc_programs),
    ),
    (("LocalStack", localstack_python),),
)
"""Side by side; what one of them sets up waits for what is before it: it would use the same caches."""


def main() -> int:
    """Set up everything; 0 whatever could not be had."""
    forget_failures()
    with ThreadPoolExecutor(len(LINES)) as pool:
        for _ in pool.map(_set_up, LINES):
            pass
    return 0


def _set_up(line: tuple[tuple[str, Installer], ...]) -> None:
    for name, install in line:
        began = time.monotonic()
        try:
            install(TIMEOUT_S)
        except NotInstallableError as error:
            print(f"{name}: not available: {error}", flush=True)
        else:
            print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
