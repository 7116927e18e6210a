"""Where a server listens: its settings, limits and advertised address."""
