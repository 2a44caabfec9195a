"""Several GPUs for one call: tokens shared by context parallelism, and branches of guidance side by side."""
