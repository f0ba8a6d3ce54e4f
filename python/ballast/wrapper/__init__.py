"""A torch optimizer whose state and gradients are partitioned over ranks and tiers. `ballast.wrap()` imports it: only
this folder, `ballast/checkpoint/` and `ballast/models/` know torch."""
