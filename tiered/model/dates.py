"""Times that have a date. No checksum covers a store timestamp, so a damaged one may be any integer."""

DATES_BEGIN_MS, DATES_END_MS = -62_135_596_800_000, 253_402_300_799_999
"""The first and the last of the years 1 to 9999, ms since the epoch."""
PLAUSIBLE_MS = range(946_684_800_000, 4_102_444_800_000)
"""Integers that are times: 2000 to 2099. Outside are seconds, years, microseconds, dates of twelve or more digits."""
