"""Fine-tune a diffusers model with SLA's sparse and linear attention, and run models that others trained so.

Read ``module.py`` first: ``SparseLinearAttention`` is SLA's attention as a trainable module. ``swap.py`` puts it into a
pipeline's blocks, and writes and reads the fine-tuned model. ``checkpoints.py`` finds the preset for a checkpoint.
docs/guide/finetuning.md has the steps from a data set to a preset.
"""

from dit_accel.sla.module import SparseLinearAttention

__all__ = ["SparseLinearAttention"]
