"""Tools built on acceleration: measure, compare and tune; recommend a preset; show results.

``measure`` times runs, compares them and tunes presets. ``advise`` names a preset without loading anything. ``media``
writes videos and plots. ``comfyui`` has the node for ComfyUI, and ``demo`` finds the trained demo models.
"""
