"""FLUX.2, dev and Klein: double blocks, then single blocks whose attention and MLP are one module, text first.

Reference images follow the latents and count as vision. If Klein's key-value cache holds their keys from the first step
on, attention has more keys than queries and runs unaccelerated.
"""

from dataclasses import replace

from dit_accel.models.families import flux

FAMILY = replace(
    flux.FAMILY,
    name="flux2",
    title="FLUX.2",
    model="Flux2Transformer2DModel",
    mlp=lambda transformer: 3 * transformer.config.mlp_ratio,  # gated: two matrices in, one out
    words=("flux2", "flux2kleinbase"),
    steps=50,
    distilled={"klein": 4},
    several_images=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline"),
)
