"""Jobs over archives and broker stores, each a function and a verb of ``python -m pipeline``.

offload    bulk back-fill of store directories        export   Parquet files or a Delta table, incrementally
audit      every byte of an archive checked           stats    what is in an archive, as numbers and a page
diff       archive against store, message by message  search   SQL over headers and bodies
"""
