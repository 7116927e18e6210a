"""Decoded blocks of segments: requests, priorities, caches, one byte budget, one request per block."""
