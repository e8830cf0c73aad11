"""From one layout to another: the steps, the cheapest way, its cost, and its program."""
