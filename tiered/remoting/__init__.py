"""RocketMQ's remoting protocol: a codec without I/O, and a small blocking client."""
