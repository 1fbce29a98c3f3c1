"""What may be deleted: expiry, reachability, orphans and dead jobs. Contains every rule about
deletion.
"""
