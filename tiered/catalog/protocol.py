"""STUB: signatures, being filled in."""
