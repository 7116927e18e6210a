"""Prefetch: AIMD windows by group and queue, and their event log."""
