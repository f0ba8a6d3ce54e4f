"""The life of a training."""
