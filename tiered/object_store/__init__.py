"""Object stores: one small protocol, three back ends (s3, file, memory), wrappers for retry, metrics, throttle, faults."""
