"""Jobs over archives and broker stores. Each is a function and a verb of ``tiered-spark``.

backfill   archives store directories in parallel     export    writes Parquet files or a Delta table, incrementally
verify     checks every byte of an archive            compact   both compactions of ``tiered``, on many machines
"""
