"""Each request code of every mode's handler tables declares what it requires."""

import asyncio
from typing import Any

import pytest

from fetcher.policy.read_policy import ReadPolicies
from rocketmq_tiered.server.proxy.proxy_service import MERGED_CODES, ProxyConfig, ProxyService
from rocketmq_tiered.server.security.permissions import NEEDS
from rocketmq_tiered.server.slave.registration import SlaveConfig
from rocketmq_tiered.server.slave.slave_service import (
    READ_ONLY,
    RELAYED,
    SlaveOptions,
    SlaveService,
)
from rocketmq_tiered.server.wire.request_fields import FIELDS
from tests.server.small_archive import small_service
from tiered.settings.sections import ServeSettings


def archive_codes() -> set[int]:
    async def started() -> set[int]:
        service = small_service()
        await service.start()
        await service.close(0.0)
        return set(service.table.codes())

    return asyncio.run(started())


def proxy_codes() -> set[int]:
    config = ProxyConfig("b", "127.0.0.1:1", ("127.0.0.1:2",), "127.0.0.1:3")
    return {*ProxyService(config, ServeSettings(), ReadPolicies()).table.codes(), *MERGED_CODES}


def slave_codes() -> set[int]:
    slave = SlaveConfig("b", "127.0.0.1:1", ("127.0.0.1:2",), "127.0.0.1:3", 7)
    table = SlaveService(SlaveOptions(slave, "c", ServeSettings())).table
    return {*table.codes(), *MERGED_CODES, *READ_ONLY, *(RELAYED & NEEDS.keys())}


@pytest.mark.parametrize("codes", [archive_codes, proxy_codes, slave_codes])
def test_every_handled_code_declares_what_it_requires(codes: Any) -> None:
    handled = codes()
    assert len(handled) > 10
    assert handled - NEEDS.keys() == set()


def test_every_code_with_a_need_declares_its_fields() -> None:
    assert NEEDS.keys() == FIELDS.keys()
