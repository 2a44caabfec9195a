"""Recommend a preset and a command from a model's name, without loading the model.

``identify`` finds the family, ``cards`` the GPU, ``recommend`` chooses, and ``lines`` writes the code to copy.
"""
