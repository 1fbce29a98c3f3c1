"""Tables of Delta and Iceberg at one version, read file by file; nothing is written here."""
