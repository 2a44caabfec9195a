"""Show runs: videos, comparisons side by side, plots, the steps of a run, and previews of unfinished outputs."""
