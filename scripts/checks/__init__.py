"""Checks: on a GPU, over many runs, in diffusers' own tests, in other programs."""
