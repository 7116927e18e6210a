"""The write path: follows a broker's commitlog and ships it to the object store, one commit per range."""
