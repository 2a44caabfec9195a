"""Forecasts that are fitted to a few plain runs."""
