"""Messages that consumers sent back: kept under the state prefix, served again."""
