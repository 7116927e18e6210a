"""Real servers for tests: child processes on free ports of 127.0.0.1, installed into a cache on first use."""
