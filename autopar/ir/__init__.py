"""What is handed over, as values: the plan, all that is decided, and the program, all that is done."""
