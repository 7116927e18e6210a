"""The inverted proxy: clients beside a live broker dial the sidecar; it answers for the archive, relays the rest."""
