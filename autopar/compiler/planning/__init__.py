"""From a method to a plan: by hand, by degrees, or by search."""
