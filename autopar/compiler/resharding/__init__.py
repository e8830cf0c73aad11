"""Turn one layout into another: the steps, the cheapest way, its cost, and its program."""
