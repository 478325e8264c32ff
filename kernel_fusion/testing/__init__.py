"""Judges correctness by float64 references and derived error budgets, for the tests and `verify`."""
