"""POP consumption: delivery, acknowledgements, queue assignment."""
