"""What ``tests/data/upgrade/c922a86.tar.zst`` holds."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/tmp/tiered-c922a86")
"""Where it was made; the path is part of what is stored."""

QUEUES = {("one", 0): [*range(10), *range(15, 25)], ("other", 1): [*range(5)], ("%LMQ%light", 0): [*range(5)]}
"""Offsets of the archive ``reading`` by topic and queue id."""
