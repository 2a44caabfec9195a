"""Several GPUs for one call: context parallelism shares its tokens, and branches of guidance run in parallel."""
