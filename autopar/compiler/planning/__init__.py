"""Turn a method into a plan: by hand, by degrees, or by search."""
