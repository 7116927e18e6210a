"""The read path. Reads of whole queues for now live in tiered.flat_file."""
