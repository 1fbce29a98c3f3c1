"""Metadata of an epoch written anew from its data files and an older epoch, in both layouts, and
the undo of that. Changes of readable metadata are one folder up."""
