"""The ``tiered-spark`` command line: verbs, arguments, output, progress."""
