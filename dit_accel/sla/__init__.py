"""SLA's trainable attention: the module, and swapping it into a model to fine-tune it."""

from dit_accel.sla.module import SparseLinearAttention

__all__ = ["SparseLinearAttention"]
