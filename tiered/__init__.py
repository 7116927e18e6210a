"""Formats, storage, metadata and domain objects of the archive. No background tasks, no globals."""
