// Tries a cross-built wheel's libraries in an emulator: layer_norm and its gradients beside PyTorch's, without Python.
//
//   aarch64-linux-gnu-g++ -std=c++20 -O1 -w -isystem TORCH/include -isystem TORCH/include/torch/csrc/api/include
//     tests/cross_check.cpp -o cross_check -L ARM/lib -lc10 -ltorch_cpu -ldl -Wl,--allow-shlib-undefined
//   qemu-aarch64 -L ROOT -E LD_LIBRARY_PATH=ARM/lib ./cross_check kernels.so 2.13.so
//
// ROOT has a link `lib` to /usr/aarch64-linux-gnu/lib, and a file `proc/cpuinfo` of an ARM machine: PyTorch reads that of the
// host otherwise, finds no processor in it, and crashes in cpuinfo_arm_linux_init at its first operation.
// TORCH is the folder `torch` of any PyTorch of that minor version. ARM/lib has libc10 and libtorch_cpu of the other
// machine's wheel, and what these need: libcudart and libcupti, for example.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

namespace {

void* open(const char* path) {
  void* library = dlopen(path, RTLD_NOW);
  if (library) return library;
  std::puts(dlerror());
  std::exit(1);
}

at::Tensor ours(const at::Tensor& x, const at::Tensor& weight) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("kernel_fusion::layer_norm", "");
  std::vector<c10::IValue> stack{x, int64_t{1}, weight, c10::IValue(), 1e-5, 0.0, c10::IValue()};
  op.callBoxed(&stack);
  return stack[0].toTensor();
}

at::Tensor pytorch(const at::Tensor& x, const at::Tensor& weight) { return at::layer_norm(x, {x.size(1)}, weight, {}, 1e-5); }

using Norm = at::Tensor(const at::Tensor&, const at::Tensor&);

using Three = std::array<at::Tensor, 3>;

// x, weight and dy.
Three inputs(int64_t cols, at::ScalarType type) {
  const auto t = at::arange(3 * cols, at::kDouble).view({3, cols});
  return {t.sin().to(type), t[0].cos().to(type), (t * 0.7).cos().to(type)};
}

// y, dx and dweight as doubles.
Three results(Norm& norm, const Three& given) {
  const auto x = given[0].detach().requires_grad_(true), weight = given[1].detach().requires_grad_(true);
  const auto y = norm(x, weight);
  const auto grads = torch::autograd::grad({y}, {x, weight}, {given[2]});
  return {y.detach().to(at::kDouble), grads[0].to(at::kDouble), grads[1].to(at::kDouble)};
}

// The same by the formulas, in the widest type.
Three exact_results(const Three& given) {
  const auto x = given[0].to(at::kDouble), weight = given[1].to(at::kDouble), dy = given[2].to(at::kDouble);
  const auto y = at::empty_like(x), dx = at::empty_like(x), dweight = at::empty_like(weight);
  const int64_t rows = x.size(0), cols = x.size(1);
  const double* w = weight.const_data_ptr<double>();
  std::vector<long double> dw(cols, 0), n(cols);
  for (int64_t row = 0; row < rows; ++row) {
    const double *a = x.const_data_ptr<double>() + row * cols, *b = dy.const_data_ptr<double>() + row * cols;
    long double mean = 0, variance = 0, sum_g = 0, sum_gn = 0;
    for (int64_t i = 0; i < cols; ++i) mean += a[i];
    mean /= cols;
    for (int64_t i = 0; i < cols; ++i) variance += (a[i] - mean) * (a[i] - mean);
    const long double rstd = 1 / std::sqrt(variance / cols + static_cast<long double>(1e-5));
    for (int64_t i = 0; i < cols; ++i) {
      n[i] = (a[i] - mean) * rstd;
      dw[i] += b[i] * n[i];
      sum_g += static_cast<long double>(b[i]) * w[i];
      sum_gn += static_cast<long double>(b[i]) * w[i] * n[i];
    }
    for (int64_t i = 0; i < cols; ++i) {
      y.data_ptr<double>()[row * cols + i] = n[i] * w[i];
      dx.data_ptr<double>()[row * cols + i] =
          rstd * (static_cast<long double>(b[i]) * w[i] - sum_g / cols - n[i] * sum_gn / cols);
    }
  }
  for (int64_t i = 0; i < cols; ++i) dweight.data_ptr<double>()[i] = dw[i];
  return {y, dx, dweight};
}

double epsilon(at::ScalarType type) {
  if (type == at::kBFloat16) return 0x1p-8;
  if (type == at::kHalf) return 0x1p-11;
  return type == at::kFloat ? 0x1p-24 : 0x1p-53;
}

}  // namespace

int main(int, char** paths) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  open(paths[1]);
  const auto variant = reinterpret_cast<const char* (*)()>(dlsym(open(paths[2]), "kf_cpu_variant"));
  std::printf("opened, with the CPU kernels %s\n", variant());
  int bad = 0, all = 0;
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const int64_t cols : {8, 96, 1000, 4096, 70000}) {
      const auto given = inputs(cols, type);
      const auto own = results(ours, given), theirs = results(pytorch, given), exact = exact_results(given);
      for (size_t i = 0; i < 3; ++i, ++all) {
        const auto error = [&](const at::Tensor& found) { return (found - exact[i]).abs().max().item<double>(); };
        if (error(own[i]) <= 2 * (error(theirs[i]) + epsilon(type) * exact[i].abs().max().item<double>())) continue;
        ++bad;
        std::printf("%s, %ld columns, result %zu: error %g, PyTorch's %g\n", c10::toString(type), static_cast<long>(cols), i,
                    error(own[i]), error(theirs[i]));
      }
    }
  std::printf("%d of %d results are bad\n", bad, all);
  return bad != 0;
}
