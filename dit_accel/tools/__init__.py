"""Tools built on acceleration: measure, tune, compare, recommend, plot; and the shipped demo models.

Read :mod:`~dit_accel.tools.timing` first: it runs and times a call of a pipeline, which most tools do. ``compare``
compares presets with other methods and ``tune`` finds thresholds for a model; both measure with ``metrics``, and
``origin`` describes their machine. ``recommend`` names a preset without loading anything, from ``identify`` (the
family), ``cards`` (the GPU) and ``lines`` (the code to copy).

``figures``, ``timeline`` and ``strips`` show runs, ``preview`` shows unfinished ones, and ``video`` writes videos.
``comfyui`` has the node for ComfyUI, and ``demo`` finds the demo models.
"""
