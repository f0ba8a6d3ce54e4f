"""Training on several hosts that exchange parameters only now and then: the outer optimizer of `wrap(outer=...)`."""
