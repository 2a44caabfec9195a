"""Stages of a pipeline's call other than its steps: the encoding of prompts and the decoding of latents.

A stage gives the output of the module's own code within the rounding of its dtype, and stands aside with a reason on
anything that it does not know. Read `decode.py` first: a hook on an autoencoder's decoder, which compares its first
output of each shape with the decoder's own. `vae/` has a page for each class of autoencoder, and `sharing.py` gives
each of several ranks a band of a decode's rows. `images.py` converts the decoded images for the host. `prompts.py`
keeps outputs of encoders that `stamps.py` sees unchanged.
"""
