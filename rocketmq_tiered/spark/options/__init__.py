"""Options, columns and predicates of the data source."""
