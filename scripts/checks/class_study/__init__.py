"""Parts of ``scripts/checks/every_class.py``."""
