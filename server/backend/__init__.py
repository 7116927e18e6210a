"""What is served: the archive behind the handlers, and the handlers that answer from it."""
