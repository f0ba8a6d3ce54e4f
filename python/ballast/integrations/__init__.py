"""Ballast inside of training frameworks. Each module imports its framework."""
