"""How values and equations can be split over a mesh: layouts, rules and strategies."""
