"""Which segments exist: the only source of visibility. Commits, roots, pages, epochs, log histories, garbage."""
