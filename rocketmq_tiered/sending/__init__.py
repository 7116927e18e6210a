"""Sending messages to brokers: the sender, its targets, and archived messages sent again."""
