"""Archive mode: an archive served without a broker."""
