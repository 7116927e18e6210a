"""Queues as readers see them: an unbounded stream over bounded segments, and whether all of it is whole."""
