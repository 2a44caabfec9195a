"""What was tried, and what it measured."""
