"""Settings of RocketMQ's index files in broker.conf."""

from __future__ import annotations

from pathlib import Path


def broker_settings(directory: Path) -> tuple[int, int]:
    """maxHashSlotNum and maxIndexNum of a store's broker."""
    lines = (directory / "broker.conf").read_text().splitlines()
    conf = dict(line.split("=", 1) for line in lines if "=" in line)
    return int(conf["maxHashSlotNum"]), int(conf["maxIndexNum"])
