"""Which epoch a start restores and what it reads of it; rollbacks and schema evolution."""
