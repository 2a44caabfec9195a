"""Attention over the tiles of a plan, with its gradients."""
