"""Plain values shared by every layer: names of queues, the columns of a run, the tables of the catalog."""
