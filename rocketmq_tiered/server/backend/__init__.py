"""The archive as a backend, and the handlers over it."""
