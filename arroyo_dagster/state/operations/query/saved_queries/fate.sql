-- What became of an object: present, deleted, in quarantine, purged or never listed.
--
-- :path name required Its URL, or its path below the checkpoint URL. If it ends in /, of all objects below it.
select path, fate, outcome, kind, objects, size_bytes, first_at, last_at, owner, run, plan, quarantine, copy,
    purgeable_from, reason, problem
from :path.fate
