"""CUDA graphs of computed steps: what is captured, when it may be replayed, and what it holds."""
