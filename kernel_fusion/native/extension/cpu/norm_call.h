// The parts of a row norm's call that both directions share on a CPU: groups of rows, weight and bias as kernels take them,
// the stages, and rows that are quantised while they are in a core's caches.
#pragma once

#include <memory>
#include <new>

#include "cpu/kernels.h"
#include "cpu/tasks.h"
#include "quantize.h"

namespace kf {

// How the groups of rows that share a weight are computed. Groups of neighbouring rows are computed one after the other, as
// runs, by kernels that know one weight. Groups of rows at equal distances are computed together, by a kernel that knows
// all their weights.
struct Runs {
  int64_t count = 1, together = 1;  // the number of runs, and of groups in each run

  template <class Call> Runs(const Call& call, int64_t rows) {
    const Groups groups = groups_of(call);
    (groups.inner > 1 || groups.count == rows ? count : together) = groups.count;
  }
};

// Weight, bias or the residual's gate as the caller gave it, with the elements of one run made contiguous.
struct Given {
  Given(const OptionalTensor& t, int64_t num_dims, const Runs& runs, double offset, bool interleaved) {
    if (!present(t)) return;
    const GroupRows rows(t, num_dims, runs.count > 1);
    tensor = rows.tensor;
    size = rows.tensor.numel() / runs.count;
    pitch = rows.pitch * static_cast<int64_t>(tensor.element_size());
    first = {tensor.const_data_ptr(), offset, cpu_dtype(tensor.scalar_type()), interleaved};
  }
  cpu::Parameter of(int64_t run) const {
    cpu::Parameter parameter = first;
    if (parameter.data) parameter.data = static_cast<const char*>(parameter.data) + run * pitch;
    return parameter;
  }
  Tensor tensor;
  int64_t size = 0, pitch = 0;  // a run's elements, and the distance to the next run's in bytes
  cpu::Parameter first{};       // that of run 0; without data if absent
};

// The parameter of a run in the form that kernels take: as the caller gave it, or converted here, or (`later`) converted by
// the kernels. Every thread converts its own copy, because another core's copy would have to come from that core's caches.
// The memory does not come from PyTorch's allocator of tensors, because anyone may replace that by one with a lock.
class Prepared {
 public:
  Prepared(const Given& given, at::ScalarType acc, bool later = false)
      : given(given), acc(cpu_dtype(acc)), makes(!later && given.first.data && !given.first.as_is(this->acc)) {
    if (makes) made.reset(::operator new(given.size * c10::elementSize(acc), kLine));
    go_to(0);
  }
  const cpu::Parameter& of(int64_t wanted) {
    if (wanted != run) go_to(wanted);
    return parameter;
  }

 private:
  const Given& given;
  Dtype acc;
  bool makes;
  int64_t run = 0;
  cpu::Parameter parameter;

  void go_to(int64_t wanted) {
    run = wanted;
    parameter = given.of(run);
    if (!makes) return;
    cpu::kernels().prepare(parameter, given.size, made.get());
    parameter = {made.get(), 0.0, acc, false};
  }
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(void* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<void, Free> made;
};

inline size_t bytes_of(const Tensor& t) { return t.defined() ? t.nbytes() : 0; }
inline size_t bytes_of(const OptionalTensor& t) { return t ? bytes_of(*t) : 0; }

// The layout of the rows of a tensor that may be absent.
struct OptionalRows {
  std::optional<Rows> rows;
  OptionalRows(const OptionalTensor& t, int64_t num_dims) {
    if (present(t)) rows.emplace(*t, num_dims);
  }
  const void* data() const { return rows ? rows->data() : nullptr; }
  RowLayout layout() const { return rows ? rows->layout : RowLayout{}; }
};

using RowsOfStages = StageRows<OptionalRows>;
inline RowsOfStages rows_of(const StageTensors& stages, int64_t num_dims) {
  return rows_of_stages<OptionalRows>(stages, [&](const OptionalTensor& t) { return OptionalRows(t, num_dims); });
}

// The stages' arguments that both directions share. `h` is the type of h, which is the type of x if there is no residual.
template <class Call> cpu::Stages common(const Call& c, const RowsOfStages& rows, at::ScalarType h) {
  const auto acc = acc_dtype(c.input), normalized = c.is_hf() ? h : acc;
  cpu::Stages stages{c,
                     {},
                     c.dropout ? static_cast<uint64_t>(*c.seed()->template const_data_ptr<int64_t>()) : 0,
                     cpu_dtype(normalized),
                     cpu_dtype(dtype_of(c.weight) == normalized ? normalized : acc)};
  for (size_t i = 0; i < rows.rows.size(); ++i) {
    const OptionalRows& row = rows.rows[i];
    stages.rows[i] = {row.data(), row.layout(), cpu_dtype(row.rows ? row.rows->tensor.scalar_type() : acc)};
  }
  return stages;
}

// ---- Rows that one thread computes and quantises before they leave its caches -----------------------------------------------

cpu::Quantization quantization(const Quantize& quantize, at::ScalarType type, int64_t rows, int64_t cols, Quantized& to);

// Computes and quantises rows. Every thread calls make() once; its result compute(out, begin, end) then writes rows to `out`.
// They are written to y if y is kept, otherwise to memory of the thread that is used again.
template <class Make> void quantize_rows_of(const cpu::Quantization& q, Tensor* y, Make&& make) {
  constexpr int64_t kNear = 65536;  // bytes that stay in a core's L2 cache
  const int64_t size = q.type == Dtype::kDouble ? 8 : q.type == Dtype::kFloat ? 4 : 2, row_bytes = q.cols * size;
  const int64_t together = std::max<int64_t>(1, kNear / row_bytes);
  const RowLayout layout{1, q.rows, {0, 0, q.cols}};
  count(Counter::kCpuForward);
  share_by(q.rows, q.cols, std::max(together, step_of(q.cols)), [&] {
    return [&, compute = make(), room = std::unique_ptr<char[]>(new char[y ? 0 : together * row_bytes])](int64_t begin,
                                                                                                         int64_t end) mutable {
      for (int64_t first = begin; first < end; first += together) {
        const int64_t last = std::min(end, first + together);
        char* out = y ? static_cast<char*>(y->mutable_data_ptr()) + first * row_bytes : room.get();
        compute(out, first, last);
        cpu::kernels().quantize_rows(q, out, layout, first, last, first);
      }
    };
  });
}

}  // namespace kf
