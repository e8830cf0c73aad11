"""A train step as lists of operators, priced on a machine: what it takes, and what memory it needs.

models -> operators (of a layer, the ends, the update) -> prices on a machine -> pipeline -> step time
"""
