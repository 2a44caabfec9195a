"""Experiments and their measurements."""
