// The row norms of both directions need these on a CPU: groups of rows, parameters, stages and quantised rows.
#pragma once

#include <memory>
#include <new>

#include "backends.h"
#include "cpu/kernels.h"
#include "cpu/tasks.h"

namespace kf {

// How groups of rows are taken: those of neighbouring rows one after the other, as runs, each by kernels that know one weight;
// others, rows at equal distances, together, by a kernel that knows them all.
struct Runs {
  int64_t count = 1, together = 1;  // runs; groups in each

  template <class Call> Runs(const Call& call, int64_t rows) {
    const Groups groups = groups_of(call);
    (groups.inner > 1 || groups.count == rows ? count : together) = groups.count;
  }
};

// weight, bias or the residual's gate as it is given: of one run side by side.
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
  int64_t size = 0, pitch = 0;  // in elements; in bytes
  cpu::Parameter first{};       // absent
};

// The parameter of a run as rows take it: as given, made here or, `later`, by the kernels. Every thread makes its own, because
// another core's would have to come from that core's caches. Its memory does not come from PyTorch's allocator of tensors,
// which anyone may replace by one with a lock.
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

// The rows of a tensor that may be absent.
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

// The stages that both directions share; `h` is the type of h, or of x without a residual.
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

// Quantises rows that compute(out, begin, end), made by make() in every thread, writes to y if that is kept, else to
// memory that is used again.
template <class Make> void quantize_rows_of(const cpu::Quantization& q, Tensor* y, Make&& make) {
  constexpr int64_t kNear = 65536;  // bytes: of the L2 cache
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
