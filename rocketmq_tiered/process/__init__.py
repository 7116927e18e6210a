"""The process: command line, wiring, lifecycle, admin HTTP server."""
