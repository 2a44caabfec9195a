"""Cells and report of the study of conditions."""
