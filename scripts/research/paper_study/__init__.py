"""Settings of the papers' tables, and how the demo models reproduce them; see paper_tables.py."""
