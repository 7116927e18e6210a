"""Messages of the real stores that commands archive."""

MESSAGES = 18_004
