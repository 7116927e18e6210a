"""How the reading core waits and reads: coroutines, timers, threads, scheduled range reads."""
