"""Methods at 5 to 10 times less work: what is measured, how it is run, and what is told of it."""
