"""Tools built on acceleration: measure, tune, compare, plot; and the shipped demo models."""
