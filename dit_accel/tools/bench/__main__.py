"""``python -m dit_accel.tools.bench``: ``dit-accel bench kernels`` where typer, pydantic or diffusers are missing."""

import sys

from dit_accel.tools.bench.kernels import main

if __name__ == "__main__":
    sys.exit(main(program="python -m dit_accel.tools.bench"))
