"""Spark data source and jobs over archives and broker stores. Users import ``rocketmq_tiered.spark``."""
