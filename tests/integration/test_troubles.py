"""The commonest troubles: each is named everywhere, with its cause and the next step. All of them: tests/soak."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene
from tests.integration.operator_view import OperatorView, Seen
from tests.integration.troubles import TROUBLES, Trouble, case
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import RocketMq
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COMMON = ("store away", "access denied while running", "wrong broker port", "broken settings at a reload")
LIMIT_S = 30


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RocketMq]:
    try:
        found = RocketMq("5.3.3", tmp_path / "mq")
        found.start()
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ: {error}")
    found.create_topic("live0", 4)
    yield found
    found.stop()


def test_common_troubles_are_named_everywhere(
    tmp_path: Path, broker: RocketMq, minio_url: RunningStore
) -> None:
    def seen(trouble: Trouble) -> Seen:
        with case(tmp_path / re.sub(r"\W+", "-", trouble.name), broker, minio_url) as found:
            trouble.prepare(found)
            if trouble.make is not None:
                found.sidecar.start()
                found.sidecar.wait_until_following(60)
                time.sleep(2)
            view = OperatorView(found.admin, found.sidecar.log)
            if trouble.make is None:
                found.sidecar.start()
            else:
                trouble.make(found)
            return view.until_named(trouble.signs, LIMIT_S)

    troubles = [trouble for trouble in TROUBLES if trouble.name in COMMON]
    assert len(troubles) == len(COMMON)
    load = Load(1 << 40, 1000, 2, per_second=20)  # a store that nothing is written to is not asked
    with (
        Producer(broker, Scene(topics=1), load, tmp_path / "load.txt"),
        ThreadPoolExecutor(len(troubles)) as pool,
    ):
        missing = {
            one.name: found.missing() for one, found in zip(troubles, pool.map(seen, troubles), strict=True)
        }
    assert missing == {name: [] for name in COMMON}
