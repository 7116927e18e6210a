"""The web page at the admin port: read-only, rendered here, with nothing from other hosts."""
