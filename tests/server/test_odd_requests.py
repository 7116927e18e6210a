"""Whatever a request says, it is answered or is an error of its client: nothing of it ends a connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from server.archive_mode.archive_service import ArchiveService
from server.backend.backend import Bounds, PullFound, PullStatus, PullWish, TopicConfig, Unit
from server.backend.route_handlers import PROXY_TOPIC
from server.groups.group_offsets import GroupOffsets
from server.groups.group_state import GroupLog
from server.retries.retry_log import RetryLog
from server.retries.retry_queue import RetryLimits, RetryQueues
from server.wire.request import Request
from tests.server.serving_peer import RecordingPeer
from tests.server.test_retry import original
from tiered.errors import TieredError
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RemotingCommand
from tiered.settings.sections import ServeSettings


class Archive:
    """One message in each of two queues of t."""

    cluster, broker = "c", "b"

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 2, 2)}

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        return {}

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        return None

    def consumed_end(self, topic: str, queue_id: int) -> int:
        return 0

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        return Bounds(0, 1) if topic == "t" and queue_id in (0, 1) else None

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        return 5

    async def pull(self, wish: PullWish) -> PullFound:
        if wish.offset:
            return PullFound(PullStatus.OFFSET_OVERFLOW_ONE, 1, Bounds(0, 1))
        return PullFound(PullStatus.FOUND, 1, Bounds(0, 1), (original(),), 1)

    def pull_in_hand(self, wish: PullWish) -> PullFound | None:
        return None

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        return 0

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        return 5

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[Unit]:
        return []

    async def message_at_phys(self, phys: int) -> bytes | None:
        return original() if phys == 777 else None

    async def messages_by_key(self, topic: str, key: str, **limits: Any) -> list[bytes]:
        return [original()]

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.001))


NAMES = st.sampled_from(["t", "g", "%RETRY%g", "%DLQ%g", PROXY_TOPIC, "", "x" * 2000, "\ud800"])
NUMBERS = st.sampled_from(["0", "1", "-1", "777", "2147483648", str(2**63 - 1), str(-(2**63)), "1e3", ""])
WORDS = st.sampled_from(
    ["TAG", "SQL92", "a > 1", "((", "*", "true", "UPPER", "0 1 2 3 4 b 0 1", "AAAA", "POP"]
)
FIELD_NAMES = """
    topic consumerGroup group queueId queueOffset maxMsgNums sysFlag commitOffset subVersion subscription expressionType
    offset timestamp boundaryType key maxNum index count clientID originTopic delayLevel invisibleTime exp expType order
    extraInfo isForce readQueueNums b e f g h i
"""
KEYS = """
    clientID consumerDataSet groupName subscriptionDataSet topic subString expressionType subVersion mqSet brokerName
    queueId consumerGroup clientId acks so b c t q mode strategyName subscriptionData
"""
FIELDS = st.dictionaries(st.sampled_from(FIELD_NAMES.split()), NAMES | NUMBERS | WORDS)
LIKELY = st.fixed_dictionaries(
    {
        "topic": NAMES,
        "queueId": st.sampled_from("01"),
        "consumerGroup": NAMES,
        "group": NAMES,
        "offset": NUMBERS,
    }
)
VALUES: Any = st.recursive(
    st.none() | st.integers(-1, 2**64) | NAMES | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=6)
    ),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 16), LIKELY | st.just({}), FIELDS, VALUES), min_size=40, max_size=80
    )
)
def test_no_request_fails_unexpectedly(sent: list[tuple[int, dict[str, str], dict[str, str], Any]]) -> None:
    async def scene() -> None:
        archive: Any = Archive()
        store = MemoryStore()
        offsets = GroupOffsets(GroupLog(store, "one", lambda: 1), lease_ms=60_000)
        retries = RetryQueues(RetryLog(store, "one"), offsets, RetryLimits(), lambda: 1)
        service = ArchiveService(archive, offsets, retries, ServeSettings(bind="127.0.0.1:0", hold_ms_max=1))
        await service.start()
        assert service._server is not None
        table = service._server._place.handlers
        codes = sorted(table._handlers)
        for number, likely, fields, document in sent:
            code = codes[number % len(codes)]
            command = RemotingCommand(
                code, number, ext_fields=likely | fields, body=json.dumps(document).encode()
            )
            handler = table.find(code)
            assert handler is not None
            working = asyncio.ensure_future(handler(Request(command, RecordingPeer(number % 3))))
            done, _ = await asyncio.wait({working}, timeout=0.5)
            if not done:
                working.cancel()  # waits for what only the next flush brings
                continue
            error = working.exception()
            assert error is None or isinstance(error, TieredError | UnicodeEncodeError), (code, error)
        assert not any(task.done() for task in service._tasks)
        await service.close(0)

    asyncio.run(scene())
