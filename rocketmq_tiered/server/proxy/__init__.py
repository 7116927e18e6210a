"""Proxy mode: clients of a live broker dial the sidecar, which answers from the archive and relays the rest."""
