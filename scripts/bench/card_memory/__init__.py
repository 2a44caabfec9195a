"""Transformers in the memory of a small card: forms of their weights, and ways to keep them in host memory."""
