"""Ops of an autoencoder's decoder."""
