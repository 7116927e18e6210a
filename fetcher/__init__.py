"""The read path: pulls, queries, searches, caches and prefetch. Programs import it as ``rocketmq_tiered``."""
