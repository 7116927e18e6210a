"""The version of the installed program."""

from importlib import metadata

try:
    VERSION = metadata.version("rocketmq-tiered")
except metadata.PackageNotFoundError:
    VERSION = "(not installed)"
