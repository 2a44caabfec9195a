"""Fine-tune a diffusers model with SLA's sparse and linear attention.

Read ``module.py`` first: ``SparseLinearAttention`` is SLA's attention as a trainable module, which can also be used on
its own. Then read ``swap.py``: ``swap_attention`` replaces the attention of a pipeline's blocks by such modules,
``save_swapped`` and ``load_swapped`` write and read the fine-tuned model, and ``restore_attention`` undoes the swap. A
saved model runs without this package's modules: the preset policy ``sla`` applies the learned projections
(``dit_accel/sparse/policies/sla.py``). docs/guide/finetuning.md has the steps from a data set to a preset.
"""

from dit_accel.sla.module import SparseLinearAttention

__all__ = ["SparseLinearAttention"]
