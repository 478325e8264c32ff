"""The options that go together, for errors, `explain` and docs/combinations.md."""

from __future__ import annotations

# An option beside another argument, in every verb.
CONDITIONS = {
    ("weight_offset", "weight"): "needs a `weight`",
    ("group_size", "normalized_shape"): "goes with a `normalized_shape` of one dimension",
    ("out_dtype", "normalized_shape"): "with a scale per row or block goes with a `normalized_shape` of one dimension",
    ("out_dtype", "group"): "quantises whole rows, and does not go with a `group`",
}

# Why a backend lacks a verb or an option.
WITHOUT_KERNELS = {
    "group": dict.fromkeys(("cuda", "cpu"), "it has no kernels for rows that are spread over ranks"),
}


def refusal(verb: str, option: str, other: str, got: str = "") -> ValueError:
    """The error of `option` beside `other`."""
    return ValueError(f"`{verb}`: `{option}` {CONDITIONS[option, other]}{got}")


def without_kernels(what: str, backend: str) -> str | None:
    """Why `backend` has no kernels for a verb or an option, or None."""
    return WITHOUT_KERNELS.get(what, {}).get(backend)
