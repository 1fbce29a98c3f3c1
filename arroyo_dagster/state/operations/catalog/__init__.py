"""Which jobs and epochs there are, what is new, and what the catalog keeps of them."""
