"""Decoded blocks of segments: requests, lanes, caches, one byte budget, single flight."""
