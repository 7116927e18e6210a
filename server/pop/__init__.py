"""POP, acknowledgements and assignment, as a proxy needs them."""
