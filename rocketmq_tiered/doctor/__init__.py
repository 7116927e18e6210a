"""Checks of `tiered doctor`: host, broker's store, broker and object store, by trying what `tiered run` does."""
