"""Rewrites objects: row ranges in, objects out, in iterations of bounded memory."""
