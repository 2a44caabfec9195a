"""CUDA graphs of computed steps: when to capture, when a replay is valid, and what a graph keeps alive."""
