"""Carry out a program: in one process, on a cluster, or on paper."""
