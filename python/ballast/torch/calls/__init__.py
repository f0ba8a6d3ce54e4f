"""Calls of the model and of its modules."""
