"""Search the fastest plan: regions of the space, the best bound first, and what the search learns on its way."""
