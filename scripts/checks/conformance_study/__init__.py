"""Parts of conformance.py."""
