"""Values that several wings share; the module loads nothing."""

MOST_STEPS = 10_000  # more than any run has; bound for keys and options that count steps
TARGETS = ("target_error", "target_psnr", "computed_steps", "max_seconds")  # the computed steps follow from one of them
# Constant rate factor of x264: 0 is lossless, 23 is the default, and at 12 the loss is hard to see.
RATE_FACTOR = "12"
# Without macro_block_size=1 imageio would scale frames whose sides don't divide by 16. ffmpeg would warn that a .wav
# file does not name its channels, and fills the terminal if the disk is full.
X264 = {"codec": "libx264", "macro_block_size": 1, "quality": None, "ffmpeg_log_level": "fatal"}
