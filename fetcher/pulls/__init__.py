"""What a pull answers: catalog, rows, plan, blocks, batch."""
