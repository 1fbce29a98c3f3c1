from .ahash import HashVariant as HashVariant
from .routing import hash_key as hash_key
from .routing import hash_keys as hash_keys
from .routing import key_hashes as key_hashes
from .routing import matching_variants as matching_variants
