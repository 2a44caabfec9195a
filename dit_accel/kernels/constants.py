"""Numbers that an op's reference and its kernels share, so that all backends make the same decisions."""

import math

import torch

LOG2_E = math.log2(math.e)

# pooled_map
SMALLEST_SQUARED_NORM = 1e-30  # a token shorter than 1e-15 counts as zero

# select_tiles, select_rows
UNITS = 1 << 30  # units in a distribution: one is 1e-9 of its mass, and their sum fits 32 bits
SMALLEST_SHARE = 1 / 16  # lower bound for the share of guidance that differs between blocks, when choosing its unit
COUNT_SLACK = 1 << 12  # units that may be lost from a number of tiles by rounding a share

# classify_tiles
SHARE_BITS = 30  # shares are multiples of 2^-30, so that all backends get the same counts

# select_keys
BEST_SHARE = 0.999  # share of a query's largest probability; 1 - 0.999 exceeds the rounding error between two products

# norm_modulate, quantize_rows
MAX_WIDTH_TRITON = 16384  # features of a row; one program holds a row
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# attention in 8 bits, and linear layers in 8 bits
EXACT_CHANNELS = 15  # channels in float16; with the one that masks keys 16, the smallest size of a matrix unit
SAMPLING = 4  # one of this many tokens is in the statistics of q and k
INT8_MAX = 127.0
FP8_MAX = 448.0
FP16_SAFE = 32768.0  # bound of the float16 channels, in units of the int8 scale
SMALLEST_SCALE = 1e-12  # of a block or a row of zeros
LARGEST_FACTOR = 1024.0
