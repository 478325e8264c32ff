// Log-probabilities of classes in rows of logits, of which the losses are made: backends/eager/losses.py defines them.
//
// Forward keeps the logits and, of each row, the largest one and the logarithm of the sum, so backward reads the logits and
// writes their gradient. Numbers per row that the caller may give with any strides and dtypes are made contiguous first.
#include "cpu/kernels.h"
#include "cpu/tasks.h"
#include "cuda/launcher.h"
#include "shared/reduce_args.h"
#include "verb.h"

namespace kf {
namespace {

using RowNumbers = TokenLogprobCall::Result;
constexpr std::string_view kExtraNames[] = {"none", "sum", "entropy"};

OptionalTensor as_numbers(const OptionalTensor& t, at::ScalarType type) {
  return present(t) ? OptionalTensor(t->to(type).contiguous()) : std::nullopt;
}
const char* bytes_or_null(const OptionalTensor& t) { return present(t) ? bytes(*t) : nullptr; }
char* memory_of(Tensor& t) { return t.numel() ? static_cast<char*>(t.data_ptr()) : nullptr; }

// The mask in the shape of the input, whose columns lie side by side or repeat.
OptionalTensor mask_in_rows(const OptionalTensor& mask) {
  if (!present(mask) || mask->stride(-1) <= 1) return mask;
  return mask->contiguous();
}

// The tensors of a call as kernels take them.
template <class Call> struct LogitTensors {
  at::ScalarType acc;
  Rows x;
  Tensor ids;
  OptionalTensor mask, temperature, weight;
  Rows mask_rows;
  double scale, softcap;
  int64_t ignore_index, num_ids;
  bool mask_repeats;

  explicit LogitTensors(const Call& c)
      : acc(acc_dtype(c.input)), x(c.input, 1), ids(c.ids.contiguous()), mask(mask_in_rows(c.mask)),
        temperature(as_numbers(c.temperature, acc)), weight(as_numbers(c.weight, acc)),
        mask_rows(present(mask) ? Rows(mask->stride(-1) == 0 ? mask->narrow(-1, 0, 1) : *mask, 1) : x), scale(c.scale),
        softcap(c.softcap), ignore_index(c.ignore_index), num_ids(ids.numel() / x.rows),
        mask_repeats(present(mask) && mask->stride(-1) == 0) {}

  LogitRows rows() const {
    return {cpu_dtype(x.tensor.scalar_type()),
            bytes(x.tensor),
            bytes(ids),
            present(mask) ? bytes(mask_rows.tensor) : nullptr,
            bytes_or_null(temperature),
            bytes_or_null(weight),
            x.layout,
            mask_rows.layout,
            x.rows,
            x.cols,
            num_ids,
            present(mask) ? mask->stride(-1) : 0,
            scale,
            softcap,
            ignore_index};
  }

  LogitRows on_cpu() const {
    const auto* numbers = ids.template const_data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.numel(); ++i) {
      const bool ignored = numbers[i - i % num_ids] == ignore_index;
      TORCH_CHECK_INDEX(ignored || (numbers[i] >= 0 && numbers[i] < x.cols), "Target ", numbers[i],
                        " is out of bounds: there are ", x.cols, " classes");
    }
    return rows();
  }

  void launch(const void* args, bool backward, Extra extra, bool predicts) const {
    const TokenLogprobSpec spec{cpu_dtype(x.tensor.scalar_type()),
                                backward,
                                present(mask),
                                scale != 1 || temperature,
                                softcap != 0,
                                present(weight),
                                extra,
                                predicts};
    launch_over(x.rows, x.tensor.device(), spec, softmax_access(x, present(mask) ? &mask_rows : nullptr, mask_repeats), args);
  }
};

TokenLogprobArgs args_of(const LogitRows& rows, RowNumbers& results) {
  auto& [logprob, largest, log_sum, found, predicted] = results;
  return {rows, memory_of(logprob), memory_of(largest), memory_of(log_sum), memory_of(found), memory_of(predicted)};
}

void token_logprob_cpu(const TokenLogprobCall& call, Extra extra, RowNumbers& results) {
  const LogitTensors p(call);
  const cpu::TokenLogprob args{args_of(p.on_cpu(), results), extra};
  count(Counter::kCpuForward);
  run_rows(cpu::kernels().token_logprob, args, p.x.rows);
}

void token_logprob_cuda(const TokenLogprobCall& call, Extra extra, RowNumbers& results) {
  const LogitTensors p(call);
  const auto args = args_of(p.rows(), results);
  p.launch(&args, false, extra, call.predicts);
}

// The numbers that backward is given for rows.
struct RowGradients {
  OptionalTensor largest, log_sum, dlogprob, da, db, dc;

  RowGradients(const TokenLogprobBwdCall& c, at::ScalarType acc)
      : largest(as_numbers(c.largest, acc)), log_sum(as_numbers(c.log_sum, acc)), dlogprob(as_numbers(c.dlogprob, acc)),
        da(as_numbers(c.da, acc)), db(as_numbers(c.db, acc)), dc(as_numbers(c.dc, acc)) {}

  TokenLogprobBwdArgs args(const LogitRows& rows, Tensor& dx) const {
    return {rows,
            bytes_or_null(largest),
            bytes_or_null(log_sum),
            bytes_or_null(dlogprob),
            bytes_or_null(da),
            bytes_or_null(db),
            bytes_or_null(dc),
            memory_of(dx)};
  }
};

void token_logprob_bwd_cpu(const TokenLogprobBwdCall& call, Tensor& dx) {
  const LogitTensors p(call);
  const RowGradients given(call, p.acc);
  const bool streams = past_caches(p.x.tensor.nbytes() + dx.nbytes(), free_threads());
  const cpu::TokenLogprobBackward args{given.args(p.on_cpu(), dx), streams};
  count(Counter::kCpuBackward);
  prefer_huge_pages(dx);
  run_rows(cpu::kernels().token_logprob_bwd, args, p.x.rows);
}

// Kernels with an extra take both db and dc.
void token_logprob_bwd_cuda(const TokenLogprobBwdCall& call, Tensor& dx) {
  const LogitTensors p(call);
  const RowGradients given(call, p.acc);
  const auto args = given.args(p.rows(), dx);
  p.launch(&args, true, args.db || args.dc ? Extra::kSum : Extra::kNone, false);
}

constexpr Kernels token_logprob_kernels{token_logprob_cpu, token_logprob_cuda};
constexpr Kernels token_logprob_bwd_kernels{token_logprob_bwd_cpu, token_logprob_bwd_cuda};

bool is_number(const Tensor& t, const Tensor& input) { return supported(t.scalar_type()) && t.device() == input.device(); }

bool has_shape(const Tensor& t, c10::SymIntArrayRef sizes) {
  if (t.dim() != static_cast<int64_t>(sizes.size())) return false;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (!alike(t.sym_size(d), sizes[d])) return false;
  return true;
}

// Whether kernels take the tensors that both directions have.
template <class Call> bool takes_logits(const Call& c) {
  if (!readable(c.input) || c.input.dim() < 1 || known(c.input.sym_size(-1).sym_eq(0))) return false;
  const auto sizes = c.input.sym_sizes(), rows = sizes.slice(0, sizes.size() - 1);
  const auto optional = [&](const OptionalTensor& t, c10::SymIntArrayRef shape) {
    return !present(t) || (is_number(*t, c.input) && has_shape(*t, shape));
  };
  const bool many = c.ids.dim() == c.input.dim();
  const bool of_rows = c.ids.scalar_type() == at::kLong && c.ids.device() == c.input.device() &&
                       (many || has_shape(c.ids, rows)) &&
                       (!many || (has_shape(c.ids.select(-1, 0), rows) && possible(c.ids.sym_size(-1).sym_gt(0))));
  const bool masks = !present(c.mask) || (c.mask->scalar_type() == at::kBool && c.mask->device() == c.input.device() &&
                                          c.mask->layout() == at::kStrided && has_shape(*c.mask, sizes));
  return of_rows && masks && optional(c.temperature, rows) && optional(c.weight, sizes.slice(sizes.size() - 1));
}

}  // namespace

// No loss sums all log-probabilities of a row where a mask makes some of them -infinity.
bool accepts(const TokenLogprobCall& c) { return takes_logits(c) && !(c.extra == "sum" && present(c.mask)); }

RowNumbers compute(const Backend& backend, const TokenLogprobCall& c) {
  const auto options = c.input.options().dtype(acc_dtype(c.input));
  const auto rows = c.input.sizes().slice(0, c.input.dim() - 1);
  const auto numbers = [&](bool wanted) { return allocate(wanted ? rows : at::IntArrayRef({0}), options); };
  c.tensors(check_all_memory);
  const auto extra = named<Extra>(kExtraNames, c.extra, "extra");
  RowNumbers results{allocate(c.ids.sizes(), options), numbers(true), numbers(true), numbers(extra != Extra::kNone),
                     allocate(c.predicts ? rows : at::IntArrayRef({0}), options.dtype(at::kLong))};
  if (c.input.numel()) token_logprob_kernels(backend, c, extra, results);
  return results;
}

Tensor compute(const Backend& backend, const TokenLogprobBwdCall& c) {
  const auto sizes = c.input.sym_sizes(), rows = sizes.slice(0, std::max<size_t>(sizes.size(), 1) - 1);
  const auto of_rows = [&](const OptionalTensor& t) { return !present(t) || (is_number(*t, c.input) && has_shape(*t, rows)); };
  TORCH_CHECK(takes_logits(c) && !(present(c.dc) && present(c.mask)) && of_rows(c.largest) && of_rows(c.log_sum) &&
                  of_rows(c.da) && of_rows(c.db) && of_rows(c.dc) && is_number(c.dlogprob, c.input) &&
                  has_shape(c.dlogprob, c.ids.sym_sizes()),
              "kernel_fusion::token_logprob_bwd: arguments that its kernels do not take");
  Tensor dx = allocate_like(c.input, at::MemoryFormat::Contiguous);
  c.tensors(check_all_memory);
  if (dx.numel()) token_logprob_bwd_kernels(backend, c, dx);
  return dx;
}

// ---- Autograd ---------------------------------------------------------------------------------------------------------------

namespace {

struct TokenLogprobBackward : SavingNode {
  enum { kInput, kIds, kLargest, kLogSum, kEntropy, kMask, kTemperature, kWeight };
  const double scale, softcap;
  const int64_t ignore_index;
  const std::string extra;

  explicit TokenLogprobBackward(const TokenLogprobCall& c)
      : scale(c.scale), softcap(c.softcap), ignore_index(c.ignore_index), extra(c.extra) {}

  std::string name() const override { return "TokenLogprobBackward"; }
  std::string key() const override { return key_of(scale, softcap, ignore_index, extra); }

  variable_list gradients(variable_list&& grads) override {
    variable_list list = no_gradients();
    grads.resize(3);  // those of logprob, log_sum and extra
    if (!wants(0) || !(grads[0].defined() || grads[1].defined() || grads[2].defined())) return list;
    list[0] = at::GradMode::is_enabled() ? differentiable(grads) : by_kernel(grads);
    return list;
  }

 private:
  Tensor differentiable(const variable_list& grads) const {
    const Tensor input = saved(kInput), ids = saved(kIds);
    const OptionalTensor mask = optional(saved(kMask)), temperature = optional(saved(kTemperature)),
                         weight = optional(saved(kWeight));
    const TokenLogprobCall call{input, ids, mask, temperature, weight, scale, softcap, ignore_index, extra, false};
    for (const Tensor& grad : grads)
      if (grad.defined() && direct(keys_of(grad))) check_memory(grad);  // ATen's operations check none
    const auto [logprob, largest, log_sum, found, predicted] = reference(call);
    variable_list results, cotangents;
    const Tensor* each[] = {&logprob, &log_sum, &found};
    for (size_t i = 0; i < 3; ++i)
      if (grads[i].defined()) results.push_back(*each[i]), cotangents.push_back(grads[i]);
    return differentiate(results, {input}, cotangents)[0];
  }

  Tensor by_kernel(const variable_list& grads) const {
    const Tensor input = saved(kInput), ids = saved(kIds), largest = saved(kLargest), log_sum = saved(kLogSum);
    const OptionalTensor mask = optional(saved(kMask)), temperature = optional(saved(kTemperature)),
                         weight = optional(saved(kWeight));
    const Tensor dlogprob = grads[0].defined() ? grads[0] : largest.new_zeros_symint(ids.sym_sizes());
    OptionalTensor da = optional(grads[1]), db, dc;
    if (grads[2].defined()) {
      const bool sums = extra == "sum", weighs = weight.has_value();
      const Tensor& dextra = grads[2];
      if (sums) dc = dextra;
      else db = dextra.neg();
      const Tensor both =
          sums ? (weighs ? dextra.mul(weight->to(largest.scalar_type()).sum()) : dextra.mul(at::Scalar(input.sym_size(-1))))
               : dextra.mul(saved(kEntropy));
      da = da ? da->sub(both) : both.neg();
    }
    const TokenLogprobBwdCall call{input, ids,  largest,     log_sum, dlogprob, da,      db,
                                   dc,    mask, temperature, weight,  scale,    softcap, ignore_index};
    return compute_by(call.tensors(keys_of), call);
  }
};

}  // namespace

RowNumbers record(c10::DispatchKeySet keys, const TokenLogprobCall& call) {
  RowNumbers results = below_autograd(keys, call);
  const auto& [logprob, largest, log_sum, found, predicted] = results;
  const bool has_extra = call.extra != "none";
  const OptionalTensor entropy = call.extra == "entropy" ? OptionalTensor(found) : std::nullopt;
  const std::vector<TensorRef> saved{call.input, call.ids, largest, log_sum, entropy, call.mask, call.temperature, call.weight};
  std::vector<TensorRef> with_history{logprob, log_sum};
  if (has_extra) with_history.emplace_back(found);
  set_history(std::make_unique<TokenLogprobBackward>(call), {call.input}, with_history, saved);
  return results;
}

static const Verb<TokenLogprobCall> token_logprob_verb;
static const Part<TokenLogprobBwdCall> token_logprob_part;

}  // namespace kf
