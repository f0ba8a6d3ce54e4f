"""The part of the package that knows torch. `ballast.wrap()` imports it: only this folder, `ballast/checkpoint/` and
`ballast/models/` know torch."""
