"""The options of `wrap()`."""
