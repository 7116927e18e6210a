"""Topic queue mapping files of real brokers."""

from pathlib import Path

MAPPINGS = Path(__file__).parents[1] / "data" / "topic_queue_mapping"
"""Written by TopicQueueMappingSerializeWrapper and the JSON of these versions: queue ids are no strings there."""
