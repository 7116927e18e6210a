"""Slave mode: registered as a slave of the broker, for consumers that the master redirects."""
