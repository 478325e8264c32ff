"""The tables of what goes with what: of the verbs' signatures, and of core/checks.py."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import kernel_fusion as kf
from kernel_fusion.core.checks import CONDITIONS, WITHOUT_KERNELS, without_kernels

# Verbs with the same options, by what they are called in the tables.
FAMILIES = {
    "`layer_norm`, `rms_norm`": ("layer_norm", "rms_norm"),
    "`add_*`": ("add_layer_norm", "add_rms_norm"),
    "`gated_*_norm`": ("gated_layer_norm", "gated_rms_norm"),
    "`modulated_*`": ("modulated_layer_norm", "modulated_rms_norm"),
    "`add_modulated_*`": ("add_modulated_layer_norm", "add_modulated_rms_norm"),
    "`gated_act`": ("gated_act",),
    "`qk_norm_rope`": ("qk_norm_rope",),
    "`rope`": ("rope",),
}
# The arguments that tell whether a verb has an option, and what is in the annotation of one with several kinds.
OPTIONS = {
    "`weight`": ("weight", ""),
    "`bias`": ("bias", ""),
    "`weight_offset`": ("weight_offset", ""),
    "`residual`": ("residual", ""),
    "`dropout_p`": ("dropout_p", ""),
    "`pre_activation`": ("pre_activation", ""),
    "`activation`": ("activation", ""),
    "`gate`": ("gate", ""),
    "`gate_activation`, `gate_first`": ("gate_first", ""),
    "`group_size`": ("group_size", ""),
    "`scale`, `shift`": ("scale", ""),
    "`cos`, `sin`, `positions`": ("cos", ""),
    '`rounding="hf"`': ("rounding", ""),
    "`out_dtype`, a `torch.dtype`": ("out_dtype", "torch.dtype"),
    '`out_dtype`, a `Quantize` with `per="tensor"`, `"row"` or `128`': ("out_dtype", "Quantize"),
    "`group`": ("group", ""),
}
_ALIASES = {"weight": "query_weight"}
_BACKENDS = ("cuda", "triton", "cpu")


def has(verb: str, option: str) -> bool:
    """Whether a verb has one of `OPTIONS`."""
    name, kind = OPTIONS[option]
    parameters = inspect.signature(getattr(kf, verb)).parameters
    found = parameters.get(name) or parameters.get(_ALIASES.get(name, ""))
    return found is not None and kind in str(found.annotation)


def _family_has(verbs: tuple[str, ...], option: str) -> bool:
    (answer,) = {has(verb, option) for verb in verbs}
    return answer


def options() -> Iterator[str]:
    """Which options the verbs have."""
    yield "| | " + " | ".join(FAMILIES) + " |"
    yield "| --- |" + " :-: |" * len(FAMILIES)
    for option in OPTIONS:
        cells = ("yes" if _family_has(verbs, option) else "–" for verbs in FAMILIES.values())
        yield f"| {option} | " + " | ".join(cells) + " |"
    yield ""


def conditions() -> Iterator[str]:
    """The conditions of options that do not go with everything."""
    yield "| option | in one call with | |"
    yield "| --- | --- | --- |"
    for (option, other), text in CONDITIONS.items():
        yield f"| `{option}` | `{other}` | {text} |"
    yield ""


def backends() -> Iterator[str]:
    """The kernels that each backend has, and the backend that an NVIDIA GPU takes by itself."""
    yield "| | " + " | ".join(f'`"{name}"`' for name in _BACKENDS) + " | an NVIDIA GPU by itself |"
    yield "| --- |" + " --- |" * (len(_BACKENDS) + 1)
    rows = {f"`{what}`": what for what in WITHOUT_KERNELS} | {"all else": ""}
    for label, what in rows.items():
        lacks = {name: without_kernels(what, name) is not None for name in _BACKENDS}
        chosen = next((name for name in _BACKENDS[:2] if not lacks[name]), "eager")
        cells = ("raises" if lacks[name] else "kernel" for name in _BACKENDS)
        yield f'| {label} | {" | ".join(cells)} | `"{chosen}"` |'
    yield ""
