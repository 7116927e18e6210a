"""Reads the store directory of one broker: commitlog, consume queues, configuration. Never writes into it."""
