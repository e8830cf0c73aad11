"""From a train step to a program: trace, cut, plan, lower."""
