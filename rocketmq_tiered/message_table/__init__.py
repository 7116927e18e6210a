"""Messages of archives and broker stores as a table: its columns, what is selected, the plan, the scan, Arrow batches.

Spark and SQL read through it. It needs pyarrow.
"""
