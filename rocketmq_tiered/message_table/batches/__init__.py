"""Chunks of rows as Arrow record batches."""
