"""Values shared by all layers: names of queues, columns of a run, tables of the catalog."""
