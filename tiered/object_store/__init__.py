"""Object stores: one small protocol, back ends (s3, file, memory), wrappers (retry, metrics)."""
