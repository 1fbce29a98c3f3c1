"""One job's metadata tree: read, published and leased. Rows are in `tables`."""
