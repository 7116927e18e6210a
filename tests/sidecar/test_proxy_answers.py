"""Whether a broker checks its clients, by its configuration file."""

from __future__ import annotations

import pytest

from sidecar.proxy_answers import checks_clients
from tiered.broker_store.conf import broker_conf, parse_properties


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("brokerName=a\n", False),
        ("aclEnable = true\n", True),
        ("aclEnable=false\n", False),
        ("authenticationEnabled=TRUE\n", True),
        ("authorizationEnabled=true\n", True),
    ],
)
def test_brokers_that_check_clients_are_told_by_their_file(text: str, expected: bool) -> None:
    assert checks_clients(broker_conf(parse_properties(text))) is expected


def test_where_nobody_tells_they_may() -> None:
    assert checks_clients(None)
