// Tries a cross-built wheel's libraries in an emulator: layer_norm and its gradients beside PyTorch's, without Python.
//
//   aarch64-linux-gnu-g++ -std=c++20 -O1 -w -isystem TORCH/include -isystem TORCH/include/torch/csrc/api/include
//     tests/cross_check.cpp -o cross_check -L ARM/lib -lc10 -ltorch_cpu -ldl -Wl,--allow-shlib-undefined
//   qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=ARM/lib ./cross_check kernels.so 2.13.so
//
// TORCH is the folder `torch` of any PyTorch of that minor version. ARM/lib has libc10 and libtorch_cpu of the other
// machine's wheel, and what these need: libcudart and libcupti, for example.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
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

// y, dx and dweight as doubles, of inputs that `type` holds, computed in `compute`.
std::array<at::Tensor, 3> results(Norm& norm, int64_t cols, at::ScalarType type, at::ScalarType compute) {
  const auto t = at::arange(3 * cols, at::kDouble).view({3, cols});
  const auto leaf = [&](const at::Tensor& value) { return value.to(type).to(compute).detach().requires_grad_(true); };
  const auto x = leaf(t.sin()), weight = leaf(t[0].cos());
  const auto y = norm(x, weight);
  const auto grads = torch::autograd::grad({y}, {x, weight}, {(t * 0.7).cos().to(type).to(compute)});
  return {y.detach().to(at::kDouble), grads[0].to(at::kDouble), grads[1].to(at::kDouble)};
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
      const auto own = results(ours, cols, type, type), theirs = results(pytorch, cols, type, type),
                 exact = results(pytorch, cols, type, at::kDouble);
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
