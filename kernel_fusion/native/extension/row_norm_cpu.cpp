// Forward row norms on the CPU: which rows each thread takes.
#include "cpu/norm_call.h"

namespace kf {
namespace {

// The stages of a forward call as the kernels take them, and the tensors that they point to.
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

// The rows of a forward call, and their parameters.
struct ForwardRows {
  const Rows x;
  const Runs runs;
  const Dtype x_type, y_type;
  const bool bare, interleaved;
  const Given weight, bias, gate;

  explicit ForwardRows(const ForwardCall& call)
      : x(call.input, call.num_dims), runs(call, x.rows), x_type(cpu_dtype(call.input.scalar_type())),
        y_type(cpu_dtype(call.y_dtype())), bare(!call.has_stages() && !call.is_hf() && x_type == y_type && runs.together == 1),
        interleaved(bare && x_type == Dtype::kBFloat16),
        weight(call.weight, call.num_dims, runs, call.weight_offset, interleaved),
        bias(call.bias, call.num_dims, runs, 0.0, interleaved), gate(call.residual_gate(), call.num_dims, runs, 0.0, false) {}

  cpu::Forward args(const ForwardCall& call, void* y, void* mean, void* rstd, bool streams) const {
    return {x.data(), weight.first, bias.first, y,      mean,   rstd,    x.cols,
            x.layout, call.eps,     call.rms,   x_type, y_type, streams, runs.together};
  }
};

// A thread's loop over rows [begin, end), run by run, with the thread's own copies of the parameters.
class RunLoop {
 public:
  RunLoop(const ForwardRows& of, const cpu::ForwardStages& stages, at::ScalarType acc, bool later = false)
      : bare(of.bare), rows(of.x.rows / of.runs.count), stages(stages), weight(of.weight, acc, later),
        bias(of.bias, acc, later), gate(of.gate, acc, later) {}

  void operator()(cpu::Forward args, int64_t begin, int64_t end) {
    for (int64_t last; begin < end; begin = last) {
      const int64_t run = begin / rows;
      last = std::min(end, (run + 1) * rows);
      args.weight = weight.of(run);
      args.bias = bias.of(run);
      stages.residual_gate = gate.of(run);
      if (bare) cpu::kernels().forward(args, {cpu::RowStep::kRows, begin, last});
      else cpu::kernels().forward_staged(args, stages, begin, last);
    }
  }

 private:
  const bool bare;
  const int64_t rows;  // the number of rows of a run
  cpu::ForwardStages stages;
  Prepared weight, bias, gate;
};

}  // namespace

void forward_cpu(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h) {
  const ForwardRows of(call);
  const Rows& x = of.x;
  const auto acc = acc_dtype(call.input);
  const Stats s(stats, x.rows, call.rms);
  const bool streams = past_caches(call.input.nbytes() + y.nbytes(), free_threads());
  const cpu::Forward args = of.args(call, y.data_ptr(), s.mean, s.rstd, streams);
  count(Counter::kCpuForward);
  prefer_huge_pages(y);
  prefer_huge_pages(h);
  if (of.bare && of.runs.count == 1 && shares_pieces(x.rows, args.shape()))
    return run_pieces(cpu::kernels().forward, args, x.rows);
  const StagedForward staged(call, h);
  const bool by_stretches = of.bare && cpu::are_long(x.cols);
  const int64_t of_thread = ceil_div(x.rows, is_small(x.rows * x.cols) ? 1 : free_threads());
  const int64_t rows = std::min(x.rows / of.runs.count, of_thread);
  const bool later = rows <= (by_stretches ? cpu::kLongRowsTogether : cpu::kShortRowsUnprepared);
  // If the kernel prepares the parameters, it does so in each part, so a thread gets one part.
  const int64_t step = later ? rows : by_stretches ? cpu::kLongRowsTogether : step_of(x.cols);
  share_by(x.rows, x.cols, step, [&] {
    return [&, loop = RunLoop(of, staged.args, acc, later)](int64_t begin, int64_t end) mutable { loop(args, begin, end); };
  });
}

void quantized_row_norm_cpu(const ForwardCall& call, const Quantize& quantize, Tensor& y, Tensor& h, Quantized& to) {
  const ForwardRows of(call);
  const cpu::Forward args = of.args(call, nullptr, nullptr, nullptr, false);
  const StagedForward staged(call, h);
  const int64_t row_bytes = args.cols * static_cast<int64_t>(c10::elementSize(call.y_dtype()));
  prefer_huge_pages(h);
  quantize_rows_of(quantization(quantize, call.y_dtype(), of.x.rows, args.cols, to), quantize.keeps ? &y : nullptr, [&] {
    return [&, loop = RunLoop(of, staged.args, acc_dtype(call.input))](char* out, int64_t begin, int64_t end) mutable {
      cpu::Forward mine = args;
      // The address that row 0 would have: the kernel adds the offset of the rows it writes.
      mine.y = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(out) - static_cast<uintptr_t>(begin * row_bytes));
      loop(mine, begin, end);
    };
  });
}

}  // namespace kf
