"""Writes two C++ headers about the stages of a norm: their options and rows, and an operator's arguments for them.

headers.py has the command.
"""

from __future__ import annotations

from kernel_fusion.core.fields import Names, kinds
from kernel_fusion.core.spec import ALONE, FOLLOWING, ROWS, VECTORS, Stages
from kernel_fusion.core.stages import ARGUMENTS, TENSORS, Argument

_OPTIONS = [each for each in ARGUMENTS if each.type != "Tensor?"]


def _is_activation(each: Argument) -> bool:
    return isinstance(each.kind, Names) and each.kind == kinds(Stages)["activation"]


def _names(each: Argument) -> str:
    return "kActivationNames" if _is_activation(each) else f"k{each.kind.cpp}Names"


def _member(each: Argument) -> str:
    """The C++ member of a call that holds an argument which is no tensor."""
    if each.type == "float":
        return f"Dropout {each.stage};"
    if each.type == "bool":
        return f"bool {each.stage} = false;"
    return f"int32_t {each.stage} = 0;" if _is_activation(each) else f"{each.kind.cpp} {each.stage}{{}};"


def _value(each: Argument) -> str:
    """The expression that makes the member from a call. An unknown name raises even if the option is ignored."""
    if each.type == "float":
        return f"dropout_of(c.{each.name}, c.{each.owner})"
    value = f"c.{each.name}"
    if each.type == "str":
        value = (
            f"code_of({value})"
            if _is_activation(each)
            else f'named<{each.kind.cpp}>({_names(each)}, {value}, "{each.name}")'
        )
    return f"if_present(c.{each.owner}, {value})" if each.owner else value


def _argument(each: Argument) -> str:
    """The expression that makes the argument from the member."""
    if each.kind == "seed":
        return "o.dropout ? t.seed() : kAbsent"
    if each.type == "Tensor?":
        return f"t.{each.name}()"
    if each.type == "float":
        return f"o.{each.stage}.p()"
    return f"{_names(each)}[static_cast<int>(o.{each.stage})]" if each.type == "str" else f"o.{each.stage}"


def _together() -> str:
    """The expression that tells whether the stages of a call, and its residual if one is needed, go together."""
    bad = []
    for row, goes_with in ALONE.items():
        others = [each for each in _OPTIONS if each.owner != row and each.name not in goes_with]
        rows = [other for other in (*ROWS, *VECTORS) if other not in (row, *goes_with)]
        met = ["has_residual", *(_is_there(each) for each in others), *(f"present(t.{other}())" for other in rows)]
        bad.append(f"!(present(t.{row}()) && ({' || '.join(met)}))")
    bad += [f"(has_residual || !present(t.{vector}()))" for vector in VECTORS]
    return " && ".join(bad) or "true"


def _follows() -> str:
    there = {each.name: _is_there(each) for each in _OPTIONS} | {row: f"present(t.{row}())" for row in ROWS}
    return " || ".join(
        f"({there[name]} && !o.{unless})" if unless else there[name] for name, unless in FOLLOWING.items()
    )


def _is_there(each: Argument) -> str:
    return f"o.{each.stage}" if each.type in ("bool", "float") or _is_activation(each) else f"o.{each.stage} != {{}}"


def _fill(each: Argument) -> str:
    if each.type == "Tensor?":
        return f"spec.{each.stage} = dtype_or_absent(dtype_of(t.{each.name}()));"
    return f"spec.{each.stage} = {'bool(o.dropout)' if each.type == 'float' else f'o.{each.stage}'};"


def options() -> str:
    """The header of the options, with a list over all rows. It needs no library."""
    accessors = "".join(f"  const T& {row}() const {{ return rows[{i}]; }}\n" for i, row in enumerate(ROWS))
    members = "\n".join(f"  {_member(each)}" for each in _OPTIONS)
    return f"""// Options that are no tensors; at the default if a stage, or the tensor that it belongs to, is absent.
struct StageOptions {{
{members}

  bool operator==(const StageOptions&) const = default;
}};

// Something for each tensor of the input's shape.
template <class T> struct StageRows {{
  std::array<T, {len(ROWS)}> rows{{}};
{accessors}}};
"""


def arguments() -> str:
    """The header of a call's tensors, with the conversions between an operator's arguments and a call."""
    return "\n".join([_tensors(), _conversions(), _questions()])


def _tensors() -> str:
    names = {each.kind.cpp: each.kind.names for each in _OPTIONS if each.type == "str" and not _is_activation(each)}
    lists = "".join(
        f"inline constexpr std::string_view k{cpp}Names[] = {{{', '.join(f'{chr(34)}{n}{chr(34)}' for n in known)}}};\n"
        for cpp, known in names.items()
    )
    accessors = "".join(
        f"  const OptionalTensor& {name}() const {{ return *all[{i}]; }}\n" for i, name in enumerate(TENSORS)
    )
    return f"""{lists}
// The tensors of a call; absent if they do not count.
struct StageTensors {{
  static constexpr int kCount = {len(TENSORS)};
  std::array<const OptionalTensor*, kCount> all{{{", ".join(["&kAbsent" for _ in TENSORS])}}};

{accessors}
  // The one that has the input's shape. It is read beside the input, and its gradient is that of the other row.
  const OptionalTensor& row() const {{
    for (const auto* each : {{{", ".join([f"all[{TENSORS.index(row)}]" for row in ROWS])}}})
      if (present(*each)) return *each;
    return kAbsent;
  }}
}};
"""


def _conversions() -> str:
    seed = "o.dropout ? &c.seed : &kAbsent"
    given = {each.name: seed if each.kind == "seed" else f"&c.{each.name}" for each in ARGUMENTS}
    return f"""struct Stages {{
  StageOptions options;
  StageTensors tensors;
}};
// Those of a call that has them as an operator's arguments.
template <class Call> Stages stages_of(const Call& c) {{
  const StageOptions o{{{", ".join([_value(each) for each in _OPTIONS])}}};
  return {{o, {{{{{", ".join([given[name] for name in TENSORS])}}}}}}};
}}

// f(the arguments that make these).
template <class F> auto with_stages(const StageOptions& o, const StageTensors& t, F&& f) {{
  return f({", ".join([_argument(each) for each in ARGUMENTS])});
}}
"""


def _questions() -> str:
    fills = "\n".join(f"  {_fill(each)}" for each in ARGUMENTS if each.kind != "seed")
    return f"""// f(every option).
template <class F> auto with_options(const StageOptions& o, F&& f) {{
  return f({", ".join([f"o.{each.stage}" for each in _OPTIONS])});
}}

// Whether these go with each other, and with a residual if there is one.
inline bool go_together(const StageOptions& o, const StageTensors& t, bool has_residual) {{
  return {_together()};
}}

// Whether something follows norm(x) * weight + bias, so that backward computes that again.
inline bool follows(const StageOptions& o, const StageTensors& t) {{
  return {_follows()};
}}

// The fields of a spec.
template <class Spec> void describe(const StageOptions& o, const StageTensors& t, Spec& spec) {{
{fills}
}}

// make(each tensor that has the input's shape).
template <class T, class F> StageRows<T> rows_of_stages(const StageTensors& t, F&& make) {{
  return {{{{{", ".join([f"make(t.{row}())" for row in ROWS])}}}}};
}}
"""
