"""Activations in another tier."""
