"""A broker's consume queues, in files and in RocksDB: formats, reading and writing."""
