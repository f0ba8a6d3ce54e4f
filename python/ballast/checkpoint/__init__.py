"""Checkpoints: every rank writes its local shards, and any number of ranks reads them. FORMAT.md describes the
files."""
