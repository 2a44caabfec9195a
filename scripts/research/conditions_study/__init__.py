"""Cells of the study of conditions, and what is told of them."""
