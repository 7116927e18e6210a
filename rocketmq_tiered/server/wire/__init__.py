"""Connections: frames in, replies out, limits."""
