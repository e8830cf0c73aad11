"""Measurements of what autopar costs and gains; each command prints a table and writes JSON."""
