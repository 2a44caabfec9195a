"""Whole calls of full-size pipelines with random weights."""
