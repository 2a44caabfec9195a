"""Numbers that the reference of an op and its kernels share, so that every backend decides alike."""

import math

LOG2_E = math.log2(math.e)

# pooled_map
SMALLEST_SQUARED_NORM = 1e-30  # a token shorter than 1e-15 counts as zero

# select_tiles, select_rows
UNITS = 1 << 30  # of a distribution; 1e-9 of its mass is the finest that counts, and its sum fits 32 bits
SMALLEST_SHARE = 1 / 16  # the part of a block's guidance that differs is told apart as if it were at least so much
COUNT_SLACK = 1 << 12  # of UNITS: what rounding a share to units may take from a number of tiles

# classify_tiles
SHARE_BITS = 30  # shares are multiples of 2^-30, so that counts come out alike on every backend

# select_keys
BEST_SHARE = 0.999  # of a query's largest probability: below 1 by more than two products of the same vectors differ
