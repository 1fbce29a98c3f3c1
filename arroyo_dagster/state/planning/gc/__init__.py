"""What may be deleted: expiry, reachability, orphans and dead jobs. Every rule about deletion
stands here.
"""
