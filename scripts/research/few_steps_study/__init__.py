"""Variants of the closed loop where few steps are computed, and their report."""
