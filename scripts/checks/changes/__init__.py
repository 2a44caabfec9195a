"""Changes that `mutants.py` tries: plausible one-line mistakes, each with the property that it breaks."""

from itertools import chain

from scripts.checks.changes import cli, kernels, loop, models, serving, sparse, stages, tools

MUTANTS = [*chain.from_iterable(page.MUTANTS for page in (loop, sparse, models, kernels, stages, tools, serving, cli))]
