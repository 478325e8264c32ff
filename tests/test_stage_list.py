"""The list of stages (core/spec.py), and what core/stages.py makes of it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kernel_fusion.core.spec import ROWS, RowNormSpec, Stages
from kernel_fusion.core.stages import (
    ARGUMENTS,
    FIRST,
    PLACES,
    TENSORS,
    Given,
    NormCall,
    compiled_in,
    conflict,
    lacks_residual,
    of_verb,
)
from kernel_fusion.operators import schemas

_X = torch.zeros(2, 8)


@pytest.mark.parametrize("name", ["staged_row_norm", "row_norm_fwd", "row_norm_bwd"])
def test_stages_are_the_last_arguments(name: str) -> None:
    """In the order of the list, where graphs that were compiled before a stage was added do not yet have it.

    Only the arguments of a pass over pieces of rows, which such graphs do not have, come after them.
    """
    arguments = [argument.name for argument in schemas.overload(name)._schema.arguments]
    arguments = [name for name in arguments if name not in ("passes", "sums")]
    known = ["pre_activation", "activation", "dropout_p", "seed", "rounding", "gate", "gate_activation", "gate_first"]
    known += ["grouped", "residual_gate"]
    assert arguments[-len(ARGUMENTS) :] == [each.name for each in ARGUMENTS]
    assert [each.name for each in ARGUMENTS][: len(known)] == known


def test_places_are_those_of_the_operator() -> None:
    """Tensors stand where `PLACES` says, after the arguments that every norm has."""
    names = [argument.name for argument in schemas.overload("staged_row_norm")._schema.arguments]
    assert [names[PLACES[name]] for name in TENSORS] == list(TENSORS)
    assert names == [*NormCall._fields[:FIRST], *(each.name for each in ARGUMENTS)]


def test_kernels_are_compiled_for_every_field() -> None:
    """Arguments determine each field of the list; without any, it is the bare norm's."""
    assert compiled_in({}) == {field.name: field.default for field in fields(Stages)}
    given = Given(activation="silu", dropout_p=0.5, seed=torch.zeros(1, dtype=torch.int64), gate=_X.bfloat16())
    stages = Stages(**compiled_in(given._asdict()))
    assert stages == Stages(activation="silu", dropout=True, gate="bf16")
    assert stages.any
    assert not Stages(rounding="hf", grouped=True).any


def test_options_do_not_count_without_their_tensor() -> None:
    """No kernel is compiled for the activation of a gate that is absent, or for a probability without a seed."""
    given = Given(dropout_p=0.5, gate_activation="silu", gate_first=True)
    assert compiled_in(given._asdict()) == compiled_in({})


def test_a_row_says_what_it_goes_with() -> None:
    """A gate goes with its options, a rounding and groups, and with nothing else."""
    fits = Given(gate=_X, gate_activation="silu", gate_first=True, rounding="hf", grouped=True)._asdict()
    assert conflict(fits, residual=None) is None
    assert conflict(fits, residual=_X) == ("residual", "gate")
    assert conflict(fits | {"activation": "relu"}, residual=False) == ("activation", "gate")
    assert conflict(Given(activation="relu")._asdict(), residual=_X) is None
    assert conflict(fits | {"residual_gate": _X[0]}, residual=None) == ("residual_gate", "gate")


def test_a_gate_of_the_residual_needs_one() -> None:
    """It goes with every stage of its norm; without a residual it is refused instead of being ignored."""
    given = Given(activation="relu", pre_activation="relu", residual_gate=_X[0])._asdict()
    assert conflict(given, residual=_X) is None
    assert (lacks_residual(given, _X), lacks_residual(given, None), lacks_residual({}, None)) == (False, True, False)
    with pytest.raises(RuntimeError, match="`residual_gate` needs a `residual`"):
        torch.ops.kernel_fusion.staged_row_norm(_X, None, 1, None, None, 1e-5, 0.0, None, False, **given)


def test_a_verb_draws_a_seed_while_training() -> None:
    """Explanations know whether dropout runs, although a verb is given no seed."""
    assert of_verb({"dropout_p": 0.5, "training": True})["seed"]
    assert of_verb({"dropout_p": 0.5, "training": False})["seed"] is None


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_read_beside_x(row: str) -> None:
    """Plans and keys find the row of any stage by what it is."""
    spec = RowNormSpec("backward", False, 8, "bf16", "bf16", **{row: "f32"})  # type: ignore[arg-type]
    assert (spec.beside, spec.pre_x, spec.follows, spec.has_stages) == ("f32", "f32", True, True)
