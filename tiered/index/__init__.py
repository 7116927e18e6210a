"""Index files: which messages carry a key, and which objects hold a stretch of the commitlog."""
