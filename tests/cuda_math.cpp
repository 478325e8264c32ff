// Measures RoughMath and RoughestMath of native/kernels/math.cuh on the host: for every elementary function, and for value and
// slope of every activation, the largest error over the given arguments, with instructions that err upwards or downwards as far
// as they may. And of SingleMath what is not CUDA's own.
//
//   cuda_math ARGUMENTS    a file of floats
//
// prints lines "name error argument", the argument of the largest error (relative; of normal_cdf and of fp32 absolute), and the
// same of "TYPE.name.value" and "TYPE.name.slope" (in halves of an ulp of TYPE, fp16 or bf16).
#include <math.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "kernels/math.cuh"

namespace {

using namespace kf;
using Exact = Math<double>;

// The PTX ISA's bounds. A power of two has an exact reciprocal, of which infinities make use.
template <int kSign> struct Worst {
  static float off(double exact, double error) {
    const auto v = static_cast<float>(isfinite(exact) ? exact + kSign * error : exact);
    return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v;
  }
  static double flushed(float v) { return fabsf(v) < 0x1p-126f ? copysign(0.0, v) : v; }
  static float exp2(float x) {
    const double exact = ::exp2(flushed(x));
    return off(exact, exact * 0x1p-22);
  }
  static float log2(float x) {
    const double exact = ::log2(flushed(x));
    return off(exact, 0x1p-22 * (x > 0.5f && x < 2.0f ? 1.0 : fabs(exact)));
  }
  static float sqrt(float x) {
    const double exact = ::sqrt(flushed(x));
    return off(exact, exact * 0x1p-23);
  }
  static float reciprocal(float x) {
    const double exact = 1.0 / flushed(x);
    int exponent;
    return off(exact, frexp(exact, &exponent) == 0.5 ? 0.0 : exact * 0x1p-23);
  }
};

using Single = SingleMathOn<Worst<0>>;

std::vector<float> read(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (!file) std::exit(2);
  std::vector<float> all;
  float v;
  while (std::fread(&v, sizeof v, 1, file) == 1) all.push_back(v);
  std::fclose(file);
  return all;
}

// Exact arithmetic on the same formula in fp32 says where a result is no number or infinite.
struct Largest {
  double error = 0;
  float argument = 0;
};

Largest largest(const std::vector<float>& xs, auto&& rough, auto&& single, auto&& exact, auto&& scale) {
  Largest most;
  for (const float x : xs) {
    const float got = rough(x), kind = single(x);
    const double want = exact(x), error = fabs(got - want) / scale(x, want);
    const bool same = isfinite(kind) ? isfinite(got) : isnan(kind) ? isnan(got) : got == kind;
    if (!same) std::fprintf(stderr, "at %a: %a instead of %a\n", x, got, kind);
    if (!same) return {INFINITY, x};
    if (isfinite(kind) && error > most.error) most = {error, x};
  }
  return most;
}

void print(const char* name, const Largest& most) { std::printf("%s %g %a\n", name, most.error, most.argument); }

// The functions are inlined wherever they are called, so none has an address.
#define KF_PRINT(name, xs, rough, single, exact, scale)                                                                       \
  print(name, largest(                                                                                                        \
                  xs, [](float x) { return rough(x); }, [](float x) { return single(x); }, [](double x) { return exact(x); }, \
                  scale));

template <class M> typename M::V phi_of(typename M::V x) {
  typename M::V power;
  return act::gelu::phi<M>(x, power);
}

template <class M> void elementary(const std::vector<float>& xs) {
  // Results below the smallest normal number may be zero.
  const auto relative = [](float, double want) { return fmax(fabs(want), 0x1p-109); };
  const auto absolute = [](float, double) { return 1.0; };
  std::vector<float> moderate, positive;
  for (const float x : xs) {
    if (!(fabsf(x) >= 32)) moderate.push_back(x);
    if (!(x < 0)) positive.push_back(x);
  }
  KF_PRINT("tanh", xs, M::tanh, Single::tanh, Exact::tanh, relative)
  KF_PRINT("normal_cdf", xs, phi_of<M>, phi_of<Single>, phi_of<Exact>, absolute)
  KF_PRINT("exp", moderate, M::exp, Single::exp, Exact::exp, relative)
  KF_PRINT("expm1", moderate, M::expm1, Single::expm1, Exact::expm1, relative)
  KF_PRINT("log1p", positive, M::log1p, Single::log1p, Exact::log1p, relative)
}

template <class M> typename M::V power_of(typename M::V x) {
  typename M::V power;
  act::gelu::phi<M>(x, power);
  return power;
}

template <class M> void single(const std::vector<float>& xs) {
  const auto absolute = [](float, double) { return 1.0; };
  KF_PRINT("fp32.normal_cdf", xs, M::normal_cdf, act::gelu::phi<Single>, act::gelu::phi<Exact>, absolute)
  KF_PRINT("fp32.power", xs, power_of<M>, power_of<Single>, power_of<Exact>, absolute)
}

// `half` an ulp of a number just below 1. The measure is half an ulp of the result or, where a formula cancels, of 1/64 of its
// argument.
auto halves_of_an_ulp(double half) {
  return [half](float x, double want) { return half * fmax(fmax(fabs(want), 0x1p-109), fmin(fabs(x), 1.0) / 64); };
}

#define KF_PRINT_BOTH(type, name, scale)                                                                               \
  KF_PRINT(type "." #name ".value", xs, act::name::value<M>, act::name::value<Single>, act::name::value<Exact>, scale) \
  KF_PRINT(type "." #name ".slope", xs, act::name::slope<M>, act::name::slope<Single>, act::name::slope<Exact>, scale)

template <class M> void activations(const std::vector<float>& xs) {
  const auto scale = halves_of_an_ulp(0x1p-12);
#define KF_PRINT_FP16(name) KF_PRINT_BOTH("fp16", name, scale)
  KF_ACTIVATIONS(KF_PRINT_FP16)
#undef KF_PRINT_FP16
}

// The one that has another formula there.
template <class M> void activations_of_bf16(const std::vector<float>& xs) {
  const auto scale = halves_of_an_ulp(0x1p-9);
  KF_PRINT_BOTH("bf16", gelu, scale)
}

struct HalfPrecision {
  unsigned short bits;
};
static_assert(std::is_same_v<MathFor<float, bf16>::type, RoughestMath>);
static_assert(std::is_same_v<MathFor<float, HalfPrecision>::type, RoughMath>);
static_assert(std::is_same_v<MathFor<float, float>::type, Math<float>>);
static_assert(std::is_same_v<ChainMathFor<float, float>::type, SingleMath>);
static_assert(std::is_same_v<ChainMathFor<float, bf16>::type, RoughestMath>);

}  // namespace

int main(int, char** argv) {
  const auto xs = read(argv[1]);
  single<SingleMathOn<Worst<1>>>(xs);
  single<SingleMathOn<Worst<-1>>>(xs);
  elementary<RoughMathOn<Worst<1>>>(xs);
  elementary<RoughMathOn<Worst<-1>>>(xs);
  activations<RoughMathOn<Worst<1>>>(xs);
  activations<RoughMathOn<Worst<-1>>>(xs);
  activations_of_bf16<RoughestMathOn<Worst<1>>>(xs);
  activations_of_bf16<RoughestMathOn<Worst<-1>>>(xs);
}
