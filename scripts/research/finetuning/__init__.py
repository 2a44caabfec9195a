"""Parts of `finetune_sla.py`: training data, training, and evaluation."""
