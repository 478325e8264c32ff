"""How correctness is judged: float64 references and derived error budgets. Used by the tests and by `verify`."""
