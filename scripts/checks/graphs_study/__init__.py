"""Situations that a replayed step must follow."""
