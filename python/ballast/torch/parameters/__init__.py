"""Where the values of parameters are, and how torch sees them."""
