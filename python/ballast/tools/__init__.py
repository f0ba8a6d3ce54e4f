"""The commands of `ballast`: planning, measuring, examining, reporting, and commands on checkpoints."""
