"""Make the plans of methods that say themselves what they are: layouts, degrees, or the plan of another step."""
