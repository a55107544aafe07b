"""Recipes: the typed schema of the base sections, the YAML reader with overrides and error messages, and the variants
of a sweep. This is the lowest layer of `trainer`; from this project it imports only `shards`.
"""
