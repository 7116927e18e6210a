"""The process: command line, wiring, lifecycle, admin HTTP. The only package that knows all others."""
