"""Object stores behind a URL: clients, credentials and options. The contract is in
`storage/store.py`.
"""
