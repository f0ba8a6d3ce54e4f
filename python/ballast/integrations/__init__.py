"""Ballast inside of other frameworks. Each module needs its framework, and is imported where a script names it."""
