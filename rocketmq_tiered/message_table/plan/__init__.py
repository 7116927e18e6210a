"""Which slices of which objects a DataFrame or a batch reads. Reads catalogs only."""
