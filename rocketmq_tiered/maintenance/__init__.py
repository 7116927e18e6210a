"""What works on a bucket alone: it needs no broker, and never owns an epoch."""
