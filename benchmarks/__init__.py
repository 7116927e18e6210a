"""Benchmarks: how fast and how dear the archive's paths are, beside what the machine itself could do."""
