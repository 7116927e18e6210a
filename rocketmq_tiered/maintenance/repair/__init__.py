"""Repair: the whole state of a damaged archive from what is left of it, in one commit."""
