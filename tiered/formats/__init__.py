"""Bytes that outlive the process: records as brokers store them, segments, containers, object keys."""
