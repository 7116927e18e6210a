"""Reading ahead: AIMD windows by group and queue, and the record of what they did."""
