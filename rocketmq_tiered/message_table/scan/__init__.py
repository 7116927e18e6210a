"""Rows of archives and of broker stores, as chunks of columns."""
