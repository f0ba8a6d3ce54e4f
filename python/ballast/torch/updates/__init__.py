"""How updates are made, and where an optimizer's state is."""
