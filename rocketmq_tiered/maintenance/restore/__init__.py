"""Makes a broker's store directory from an archive: `tiered restore`."""
