"""Spark over the archive. Never imported by the sidecar."""
