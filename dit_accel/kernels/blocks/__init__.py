"""Ops of a transformer's blocks around attention: norms, gates, rotary embeddings and linear layers."""
