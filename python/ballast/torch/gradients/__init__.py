"""Gradients on their way from torch to the library."""
