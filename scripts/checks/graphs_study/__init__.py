"""Changes that a replayed step must follow."""
