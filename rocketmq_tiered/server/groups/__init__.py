"""Consumer groups: clients and their subscriptions, group offsets, queue locks."""
