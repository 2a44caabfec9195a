#!/usr/bin/env python3
"""`dit-accel bench kernels` for machines that have torch and Triton but not what else dit-accel needs.

python scripts/bench_kernels.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from dit_accel.tools.bench.kernels import main

if __name__ == "__main__":
    sys.exit(main())
