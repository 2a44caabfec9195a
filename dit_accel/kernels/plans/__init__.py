"""Plans: the tiles and rows that compute, from maps of attention to lists for kernels."""
