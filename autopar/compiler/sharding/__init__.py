"""Layouts, rules and strategies: the ways in which values and equations can be split over a mesh."""
