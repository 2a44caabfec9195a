"""Where in a model does acceleration apply? A family is a page of facts, by which drivers and hooks work."""

from dit_accel.models.denoisers import TRANSFORMER_NAMES, denoisers

__all__ = ["TRANSFORMER_NAMES", "denoisers"]
