"""Turn a train step into a program: trace, cut, plan, lower."""
