"""Our presets beside what else makes diffusion transformers faster, on the same pipeline, prompts and seeds.

    bench = Bench(load, arguments, prompts, tuning_prompt)
    for method in [*our_methods(bench.pipe, presets), *peer_methods(bench.pipe, steps, peers)[0]]:
        row = bench.measure(method)

Every run is compared with the plain run of its prompt and seed. Computed fractions are counted at the linear layers of
the transformer's blocks, whatever the method (:mod:`~dit_accel.tools.compare.work`); after every method the pipeline is
shown to be as it was (:mod:`~dit_accel.tools.compare.snapshot`).
"""

from dit_accel.tools.compare.methods import Method, Subject, fixed_schedules, our_methods
from dit_accel.tools.compare.peers import PEERS, peer_methods, spread
from dit_accel.tools.compare.runs import Bench, Prompt
from dit_accel.tools.compare.sweep import Sweep

__all__ = [
    "PEERS",
    "Bench",
    "Method",
    "Prompt",
    "Subject",
    "Sweep",
    "fixed_schedules",
    "our_methods",
    "peer_methods",
    "spread",
]
