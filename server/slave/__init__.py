"""Slave mode: listed under the broker's name with an id of its own, for consumers that are sent there."""
