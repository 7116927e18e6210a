"""Archive or broker: the read policy's decisions, and reading a broker's own files."""
