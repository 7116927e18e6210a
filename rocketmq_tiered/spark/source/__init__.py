"""DataFrames and streams: the Spark session, the data source, and the reader in a worker."""
