"""Archived queues as unbounded streams over bounded segments, and the verification of archives."""
