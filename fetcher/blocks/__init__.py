"""Decoded blocks of segments: requests, priorities, caches, one byte budget, single flight."""
