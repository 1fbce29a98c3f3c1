"""Test packages and dataflows in process, with given and expected rows. Services do not use it."""
