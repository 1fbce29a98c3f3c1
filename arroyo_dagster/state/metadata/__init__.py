"""One job's metadata tree: how it is read, published and leased. Rows are in `tables`."""
