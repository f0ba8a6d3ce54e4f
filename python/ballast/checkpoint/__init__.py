"""Checkpoints: written by all ranks, each its own part, and read by as many others. FORMAT.md describes the files."""
