"""Exact solvers of the papers' optimisation problems: arrays in, arrays out, no learning."""
