"""Checks across settings: values that contradict each other, and addresses. Pure.

Checks within one section are its ``complaints`` in sections.py.
"""

from __future__ import annotations

from tiered.model.address import host_and_port
from tiered.model.zone import parse_zone
from tiered.settings.sections import Settings

_ADDRESS = "write host:port, such as 127.0.0.1:10911"


def contradictions(settings: Settings) -> list[tuple[str, str]]:
    """(key, complaint) pairs."""
    offload = settings.offload
    found: list[tuple[str, str]] = []
    if offload.memory_budget_bytes < 3 * offload.batch_bytes:
        found.append(
            (
                "offload.memory_budget_bytes",
                f"must be at least 3 × offload.batch_bytes = {3 * offload.batch_bytes}: one batch each is read, "
                "encoded, uploaded",
            )
        )
    if settings.broker.time_zone:
        try:
            parse_zone(settings.broker.time_zone)
        except ValueError as error:
            found.append(("broker.time_zone", str(error)))
    found += [(key, _ADDRESS) for key, text in _addresses(settings) if host_and_port(text) is None]
    for section in (
        settings.serve,
        settings.broker,
        settings.read,
        settings.retention,
        settings.slave,
        settings.object_store,
    ):
        found += section.complaints()
    return found


def _addresses(settings: Settings) -> list[tuple[str, str]]:
    """(key, address) of every address that is set."""
    broker, serve, slave = settings.broker, settings.serve, settings.slave
    if_set = [
        ("broker.address", broker.address),
        *(("broker.name_servers", text) for text in broker.name_servers),
        ("serve.advertise", serve.advertise),
        ("slave.advertise", slave.advertise),
    ]
    return [
        ("serve.bind", serve.bind),
        ("slave.bind", slave.bind),
        *((key, text) for key, text in if_set if text),
    ]
