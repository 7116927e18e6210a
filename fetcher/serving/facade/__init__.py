"""The inverted façade: clients beside a live broker dial the sidecar, which answers for the archive and relays the rest."""
