"""Which files to merge or rewrite, and what a merge changes in the metadata."""
