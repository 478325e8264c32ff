// The stages around a norm, which core/spec.py lists: an operator's arguments for them, and what a call has of them.
// Written by `python -m kernel_fusion.backends.cuda.headers`.
#pragma once

// clang-format off
#include <array>

#include "operators.h"
#include "stage_options.h"

namespace kf {

inline constexpr std::string_view kRoundingNames[] = {"once", "hf"};

// The tensors of a call; absent if they do not count.
struct StageTensors {
  static constexpr int kCount = 3;
  std::array<const OptionalTensor*, kCount> all{&kAbsent, &kAbsent, &kAbsent};

  const OptionalTensor& seed() const { return *all[0]; }
  const OptionalTensor& gate() const { return *all[1]; }
  const OptionalTensor& residual_gate() const { return *all[2]; }

  // The one that has the input's shape. It is read beside the input, and its gradient is that of the other row.
  const OptionalTensor& row() const {
    for (const auto* each : {all[1]})
      if (present(*each)) return *each;
    return kAbsent;
  }
};

struct Stages {
  StageOptions options;
  StageTensors tensors;
};
// Those of a call that has them as an operator's arguments.
template <class Call> Stages stages_of(const Call& c) {
  const StageOptions o{code_of(c.pre_activation), code_of(c.activation), dropout_of(c.dropout_p, c.seed), named<Rounding>(kRoundingNames,
    c.rounding, "rounding"), if_present(c.gate, code_of(c.gate_activation)), if_present(c.gate, c.gate_first), c.grouped};
  return {o, {{o.dropout ? &c.seed : &kAbsent, &c.gate, &c.residual_gate}}};
}

// f(the arguments that make these).
template <class F> auto with_stages(const StageOptions& o, const StageTensors& t, F&& f) {
  return f(kActivationNames[static_cast<int>(o.pre_activation)], kActivationNames[static_cast<int>(o.activation)], o.dropout.p(),
    o.dropout ? t.seed() : kAbsent, kRoundingNames[static_cast<int>(o.rounding)], t.gate(),
    kActivationNames[static_cast<int>(o.gate_activation)], o.gate_first, o.grouped, t.residual_gate());
}

// f(every option).
template <class F> auto with_options(const StageOptions& o, F&& f) {
  return f(o.pre_activation, o.activation, o.dropout, o.rounding, o.gate_activation, o.gate_first, o.grouped);
}

// Whether these go with each other, and with a residual if there is one.
inline bool go_together(const StageOptions& o, const StageTensors& t, bool has_residual) {
  return !(present(t.gate()) && (has_residual || o.pre_activation || o.activation || o.dropout || present(t.residual_gate()))) && (has_residual || !present(t.residual_gate()));
}

// Whether something follows norm(x) * weight + bias, so that backward computes that again.
inline bool follows(const StageOptions& o, const StageTensors& t) {
  return o.activation || (present(t.gate()) && !o.gate_first);
}

// The fields of a spec.
template <class Spec> void describe(const StageOptions& o, const StageTensors& t, Spec& spec) {
  spec.pre_activation = o.pre_activation;
  spec.activation = o.activation;
  spec.dropout = bool(o.dropout);
  spec.rounding = o.rounding;
  spec.gate = dtype_or_absent(dtype_of(t.gate()));
  spec.gate_activation = o.gate_activation;
  spec.gate_first = o.gate_first;
  spec.grouped = o.grouped;
  spec.residual_gate = dtype_or_absent(dtype_of(t.residual_gate()));
}

// make(each tensor that has the input's shape).
template <class T, class F> StageRows<T> rows_of_stages(const StageTensors& t, F&& make) {
  return {{make(t.gate())}};
}

}  // namespace kf
