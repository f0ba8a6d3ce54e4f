"""A torch optimizer whose state and gradients are partitioned over ranks and tiers. Imported when `ballast.wrap` is called:
all that knows torch is in this folder, and in `ballast/models/`."""
