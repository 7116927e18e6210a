"""Rows of a queue: catalog and queue views, read plans, message batches."""
