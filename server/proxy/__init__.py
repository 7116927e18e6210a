"""The inverted façade: clients beside a live broker dial the sidecar; it answers for the archive, relays the rest."""
