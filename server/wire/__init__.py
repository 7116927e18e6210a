"""Connections: frames in, answers out, limits; nothing of what is asked."""
