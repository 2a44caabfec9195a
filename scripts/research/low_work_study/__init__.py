"""Methods at 5 to 10 times less work: settings, runs and report."""
