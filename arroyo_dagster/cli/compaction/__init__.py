"""`arroyo-state compact`: merge small files, also of Arroyo jobs. No rules of compaction."""
