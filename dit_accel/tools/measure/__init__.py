"""Measure runs: their times, their distance from plain runs, and the settings that trade one for the other.

Read :mod:`~dit_accel.tools.measure.timing` first: it runs and times a call of a pipeline, which most tools do.
``compare`` compares presets with other methods, and ``tune`` finds thresholds for a model; both use the ``metrics``.
"""
