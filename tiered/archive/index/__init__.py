"""Index files: the messages that carry a key, and the objects that hold a range of the commitlog."""
