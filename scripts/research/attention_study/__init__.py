"""Attention methods on recorded queries, keys and values: errors, curves over thresholds, tables, a plot."""
