"""Scripts that measure and check this project; each docstring says which question the script answers."""
