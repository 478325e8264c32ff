// The CPU operators, forward: which rows each thread takes.
#include <vector>

#include "cpu/norm_call.h"
#include "cpu/quantized_rows.h"

namespace kf {
namespace {

// The stages of a forward call as pointers, and what they point to.
struct StagedForward {
  OptionalRows residual;
  RowsOfStages rows;
  cpu::ForwardStages args;

  StagedForward(const ForwardCall& call, Tensor& h)
      : residual(call.residual, call.num_dims), rows(rows_of(call, call.num_dims)) {
    args = {common(call, rows, dtype_of(call.residual).value_or(call.input.scalar_type())), residual.data(),
            h.defined() ? h.data_ptr() : nullptr, residual.layout(), cpu_dtype(dtype_of(call.residual).value_or(at::kFloat))};
  }
};

// Whether rows are long and so few that threads would wait for a quarter of their time. They then share the stretches, with the
// same results, row after row: so a thread finds in its caches what it read and wrote in the calls around this one.
bool shares_stretches(const Rows& x) {
  const int64_t rounds = ceil_div(x.rows, free_threads());
  return cpu::are_long(x.cols) && rounds <= 2 && 4 * x.rows <= 3 * free_threads() * rounds;
}

void forward_by_stretches(const cpu::Forward& args, int64_t rows) {
  constexpr int64_t kJoined = 16;  // elements that take as long as a stretch that is joined to others
  const int64_t stretches = cpu::stretches_of(args.cols), pieces = rows * stretches;
  std::vector<cpu::StretchMoments> moments(pieces);
  std::vector<cpu::RowStatistics> statistics(rows);
  share(pieces, cpu::kStretch,
        [&](int64_t begin, int64_t end) { cpu::kernels().forward_moments(args, begin, end, moments.data()); });
  share(rows, kJoined * stretches, [&](int64_t begin, int64_t end) {
    cpu::kernels().forward_statistics(args, begin, end, moments.data(), statistics.data());
  });
  share(pieces, cpu::kStretch,
        [&](int64_t begin, int64_t end) { cpu::kernels().forward_stretches(args, begin, end, statistics.data()); });
}

// Rows [begin, end), through the runs that they lie in.
void forward_runs(cpu::Forward args, cpu::ForwardStages stages, bool bare, int64_t of_run, Prepared& weight, Prepared& bias,
                  Prepared& gate, int64_t begin, int64_t end) {
  for (int64_t last; begin < end; begin = last) {
    const int64_t run = begin / of_run;
    last = std::min(end, (run + 1) * of_run);
    args.weight = weight.of(run);
    args.bias = bias.of(run);
    stages.residual_gate = gate.of(run);
    if (bare) cpu::kernels().forward(args, begin, last);
    else cpu::kernels().forward_staged(args, stages, begin, last);
  }
}

}  // namespace

void forward_cpu(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h) {
  const Rows x(call.input, call.num_dims);
  const auto acc = acc_dtype(call.input);
  const auto x_type = cpu_dtype(call.input.scalar_type()), y_type = cpu_dtype(call.y_dtype());
  const Runs runs(call, x.rows);
  const bool bare = !call.has_stages() && !call.is_hf() && x_type == y_type && runs.together == 1;
  const bool interleaved = bare && x_type == Dtype::kBFloat16;
  const Given weight(call.weight, call.num_dims, runs, call.weight_offset, interleaved),
      bias(call.bias, call.num_dims, runs, 0.0, interleaved), gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  char* mean = nullptr;
  char* rstd = nullptr;
  if (call.wants_stats) {
    mean = static_cast<char*>(stats.data_ptr());
    rstd = call.rms ? mean : mean + x.rows * stats.element_size();
    if (call.rms) mean = nullptr;
  }
  const cpu::Forward args{x.data(),
                          weight.first,
                          bias.first,
                          y.data_ptr(),
                          mean,
                          rstd,
                          x.cols,
                          x.layout,
                          call.eps,
                          call.rms,
                          x_type,
                          y_type,
                          past_caches(call.input.nbytes() + y.nbytes(), free_threads()),
                          runs.together};
  count(Counter::kCpuForward);
  prefer_huge_pages(y);
  prefer_huge_pages(h);
  if (bare && runs.count == 1 && shares_stretches(x)) return forward_by_stretches(args, x.rows);
  const StagedForward staged(call, h);
  const bool by_stretches = bare && cpu::are_long(x.cols);
  const int64_t of_run = x.rows / runs.count;
  const int64_t rows = std::min(of_run, ceil_div(x.rows, is_small(x.rows * x.cols) ? 1 : free_threads()));  // of a thread
  const bool later = rows <= (by_stretches ? cpu::kLongRowsTogether : cpu::kShortRowsUnprepared);
  // The kernel prepares parameters anew in each part, so a thread has one part then.
  share_by(x.rows, x.cols,
           later          ? rows
           : by_stretches ? cpu::kLongRowsTogether
                          : step_of(x.cols),
           [&] {
             return [&, w = Prepared(weight, acc, later), b = Prepared(bias, acc, later), g = Prepared(gate, acc, later)](
                        int64_t begin, int64_t end) mutable {
               forward_runs(args, staged.args, bare, of_run, w, b, g, begin, end);
             };
           });
}

void quantized_row_norm_cpu(const ForwardCall& call, const Quantize& quantize, Tensor& y, Tensor& h, Quantized& to) {
  const Rows x(call.input, call.num_dims);
  const Runs runs(call, x.rows);
  const auto acc = acc_dtype(call.input);
  const auto x_type = cpu_dtype(call.input.scalar_type()), y_type = cpu_dtype(call.y_dtype());
  const bool bare = !call.has_stages() && !call.is_hf() && x_type == y_type && runs.together == 1;
  const bool interleaved = bare && x_type == Dtype::kBFloat16;
  const Given weight(call.weight, call.num_dims, runs, call.weight_offset, interleaved),
      bias(call.bias, call.num_dims, runs, 0.0, interleaved), gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  const cpu::Forward args{x.data(), weight.first, bias.first, nullptr, nullptr, nullptr, x.cols,
                          x.layout, call.eps,     call.rms,   x_type,  y_type,  false,   runs.together};
  const StagedForward staged(call, h);
  const int64_t of_run = x.rows / runs.count;
  const int64_t row_bytes = x.cols * static_cast<int64_t>(c10::elementSize(call.y_dtype()));
  prefer_huge_pages(h);
  quantize_rows_of(quantization(quantize, call.y_dtype(), x.rows, x.cols, to), quantize.keeps ? &y : nullptr, [&] {
    return [&, w = Prepared(weight, acc), b = Prepared(bias, acc), g = Prepared(gate, acc)](char* out, int64_t begin,
                                                                                            int64_t end) mutable {
      cpu::Forward mine = args;
      // The place of row 0, had it one.
      mine.y = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(out) - static_cast<uintptr_t>(begin * row_bytes));
      forward_runs(mine, staged.args, bare, of_run, w, b, g, begin, end);
    };
  });
}

}  // namespace kf
