"""What a plan names is deleted or quarantined, and recorded in the journal. What may go is decided
in `planning/gc`.
"""
