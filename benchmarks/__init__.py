"""Benchmarks: rate and cost of the archive's paths, compared with what the machine can do."""
