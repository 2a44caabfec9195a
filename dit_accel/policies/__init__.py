"""Policies turn scores of token blocks into masks; every threshold comes from the preset."""
