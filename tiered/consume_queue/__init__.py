"""The TieredConsumeQueue: 20-byte units as RocketMQ knows them, computed from a run's columns."""
