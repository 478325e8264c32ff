"""The oracle of the tests and of `verify`: it judges results by float64 references and derived error budgets."""
