"""The values that are handed over: the plan, all that is decided, and the program, all that is done."""
