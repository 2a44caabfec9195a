"""A preset of each forecast level for FLUX: some steps of a short run compute, and the others are forecast."""

from dit_accel import load_preset

CLOSED_LOOP = load_preset("turbo", target_error=0.25)  # level output
LAYERS = load_preset("flux-taylorseer", schedule={"interval": 3})
HEADS = load_preset(
    "flux-flashomni-paper",
    schedule={"warmup": 2, "interval": 3, "cooldown": 1},
    blocks={"size": 64},
    reuse={"tau_q": 0.9, "ramp": 0.3},
)
