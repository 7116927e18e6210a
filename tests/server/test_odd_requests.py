"""Whatever a request says, it is answered or is an error of its client: nothing of it ends a connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_tiered.server.backend.route_handlers import PROXY_TOPIC
from rocketmq_tiered.server.wire.request import Request
from tests.server.serving_peer import RecordingPeer
from tests.server.small_archive import small_service
from tests.sweeps import examples
from tiered.errors import TieredError
from tiered.remoting.command import RemotingCommand

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


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 16), LIKELY | st.just({}), FIELDS, VALUES), min_size=40, max_size=80
    )
)
def test_no_request_fails_unexpectedly(sent: list[tuple[int, dict[str, str], dict[str, str], Any]]) -> None:
    async def scene() -> None:
        service = small_service()
        await service.start()
        table = service.table
        codes = sorted(table.codes())
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
