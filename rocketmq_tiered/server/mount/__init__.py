"""Retired brokers, mounted read-only: archives of one prefix, shared among nodes and served in archive mode."""
