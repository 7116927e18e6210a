"""The remoting server: unmodified RocketMQ clients read an archive through it."""
