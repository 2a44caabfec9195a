"""Run ``python -m scripts.bench.kernels`` from a checkout."""

import sys

from scripts.bench.kernels.kernels import main

if __name__ == "__main__":
    sys.exit(main(program="python -m scripts.bench.kernels"))
