"""Recipes: the typed schema of the base sections, the YAML reader with overrides and error messages, and the variants
of a sweep. The folder is the bottom layer: of this project it imports only shards.errors.
"""
