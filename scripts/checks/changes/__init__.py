"""Changes that `mutants.py` tries: plausible one-line mistakes, each with the property that it breaks."""

from scripts.checks.changes import cli, loop, models, serving, stages, tools

MUTANTS = [*loop.MUTANTS, *models.MUTANTS, *cli.MUTANTS, *serving.MUTANTS, *stages.MUTANTS, *tools.MUTANTS]
