"""What processes of commit c922a86 left on disk when they were killed; see ``tests/data/upgrade/make_c922a86.py``."""

from __future__ import annotations

from tests.upgrade.left_behind import left, packed

__all__ = ["left", "packed"]
