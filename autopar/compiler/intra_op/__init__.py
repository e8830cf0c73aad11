"""The intra-operator pass: one sharding for every value of a stage, and the program that does exactly that."""
