"""Commands: what each of `python -m autopar` reads, and what it does."""
