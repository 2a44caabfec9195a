"""Parts of `finetune_sla.py`: what is trained on, how, and how the results are judged."""
