"""The tests: sentences with tables, each with an oracle."""
