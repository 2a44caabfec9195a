"""What the papers' tables ran, and how it is measured again on the demo models; see paper_tables.py."""
