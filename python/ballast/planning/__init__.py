"""From a model and a machine to a plan: the hardware, the search for a placement, its result, and what else would fit."""
