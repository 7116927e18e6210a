"""What is read: columns, predicates, and the options that choose them."""
