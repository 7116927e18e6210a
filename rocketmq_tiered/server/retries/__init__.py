"""Retry messages: stored under the state prefix, delivered again from retry topics."""
