"""Values that several wings share; the module loads nothing."""

TARGETS = ("target_error", "target_psnr", "computed_steps", "max_seconds")  # the computed steps follow from one of them
# Constant rate factor of x264: 0 is lossless, 23 is the default, and at 12 the loss is hard to see.
RATE_FACTOR = "12"
