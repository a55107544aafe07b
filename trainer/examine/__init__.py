"""Finds what is wrong with images besides their labels: duplicates, leaks, images that do not belong, bad pictures.

Pure functions of features (float [n, d], one row per image), thumbnails (uint8 [n, 3, h, w]) and labels.
"""
