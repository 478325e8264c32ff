"""The faults that mutants.py plants, and who catches them.

A fault is a small and likely mistake in a line that seldom changes: `old` stands exactly once in its file, which
tests/test_mutants.py asserts. `tests` are ids of functions that run in `make test`; of faults in CUDA source that no
test without a GPU can see, ids that `-m cuda` chooses from.
"""

from __future__ import annotations

from mutants import Mutant

_EAGER = "kernel_fusion/backends/eager"
_CORE = "kernel_fusion/core"
_CUDA = "kernel_fusion/backends/cuda"
_TRITON = "kernel_fusion/backends/triton/kernels"
_EXTENSION = "kernel_fusion/native/extension"
_KERNELS = "kernel_fusion/native/kernels"

# fmt: off
_DEFINITION = (
    Mutant(
        "eager: eps is added after the root", f"{_EAGER}/row_norm.py",
        "torch.sqrt(h.square().mean(dims, keepdim=True) + c.eps)",
        "(torch.sqrt(h.square().mean(dims, keepdim=True)) + c.eps)",
        "tests/test_oracle.py::test_long_double_results_are_those_of_the_definition",
    ),
    Mutant(
        "eager: weight_offset is subtracted", f"{_EAGER}/row_norm.py",
        "weight.to(h.dtype) + c.weight_offset", "weight.to(h.dtype) - c.weight_offset",
        "tests/test_oracle.py::test_long_double_results_are_those_of_the_definition",
    ),
    Mutant(
        "eager: h is normalised before it is rounded", f"{_EAGER}/row_norm.py",
        "h = summed.to(wide)", "h = h + residual.to(wide)",
        "tests/test_oracle_stages.py::test_h_is_rounded_once_and_normalised_as_it_is",
    ),
    Mutant(
        "eager: a mask is inverted", f"{_EAGER}/attention.py",
        "(~mask", "(mask",
        "tests/test_oracle.py::test_long_double_results_are_those_of_the_definition -k softmax",
    ),
    Mutant(
        "eager: causal keeps a column more", f"{_EAGER}/attention.py",
        ".tril()", ".tril(1)",
        "tests/test_oracle.py::test_long_double_results_are_those_of_the_definition -k softmax",
    ),
    Mutant(
        "eager: gradients of a masked row are NaN", f"{_EAGER}/attention.py",
        "function(logits.masked_fill(dead, 0.0), -1)", "function(logits, -1)",
        "tests/test_oracle_softmax.py::test_a_row_with_nothing_left_is_zero",
    ),
    Mutant(
        "eager: the upper half of a seed is ignored", f"{_EAGER}/dropout.py",
        "(seed[0] >> 32) & _LOW]", "seed[0] & _LOW]",
        "tests/test_dropout.py::test_definition_is_philox",
    ),
    Mutant(
        "eager: the second factor of a gate is activated", f"{_EAGER}/pointwise.py",
        "act(a) * b", "act(b) * a",
        "tests/test_oracle.py::test_long_double_results_are_those_of_the_definition -k gated_act",
    ),
    Mutant(
        "eager: accumulation in the dtype of the input", f"{_CORE}/spec.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32", "return dtype",
        "tests/test_oracle.py::test_the_definition_is_within_budget",
    ),
)

_LAYERS = (
    Mutant(
        "vmap: a batched weight counts as shared", "kernel_fusion/operators/vmap.py",
        "if in_dims[0] is not None and not any(map(_batched, in_dims[1:])):", "if in_dims[0] is not None:",
        "tests/test_transforms.py::test_vmap",
    ),
    Mutant(
        "vmap: reduced dimensions are not shifted", "kernel_fusion/operators/vmap.py",
        "d + 1 if d >= 0 else d for d in dim", "d for d in dim",
        "tests/test_transforms.py::test_vmap_of_dimensions",
    ),
    Mutant(
        "verbs: dropout outside of training", "kernel_fusion/functional/row_norm.py",
        " if training else 0.0\n    return staged(add_rms_norm", "\n    return staged(add_rms_norm",
        "tests/test_dropout.py::test_nothing_drops",
    ),
    Mutant(
        "verbs: an explicit request falls back", "kernel_fusion/operators/dispatch.py",
        "    if backend is not None and (reason", "    if backend not in (None, \"triton\") and (reason",
        "tests/test_errors.py::test_unavailable_backend_of_every_verb",
    ),
    Mutant(
        "tracing: softmax keeps the strides of its input", "kernel_fusion/operators/meta.py",
        "torch.empty_like(like, memory_format=torch.contiguous_format)", "torch.empty_like(like)",
        "tests/test_compile.py::test_opcheck_of_the_families",
    ),
)

_CACHES = (
    Mutant(
        "cache: the trailer is not checked", f"{_CORE}/cache.py",
        "return payload if trailer == expected else None", "return payload",
        "tests/test_cache.py::test_untrusted_entries_are_misses",
    ),
    Mutant(
        "cache: a file that a group can write is trusted", f"{_CORE}/cache.py",
        "stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH",
        "tests/test_cache.py::test_untrusted_entries_are_misses",
    ),
    Mutant(
        "cache: parts of a key run into each other", f"{_CORE}/cache.py",
        'h.update(len(data).to_bytes(8, "little"))', "pass",
        "tests/test_cache.py::test_digest_separates_its_parts",
    ),
    Mutant(
        "cache: a kernel's key lacks the headers", f"{_CUDA}/compile.py",
        "*_OPTIONS, _headers_digest()", "*_OPTIONS",
        "tests/test_cache_keys.py::test_a_kernel_is_compiled_again_if_anything_changes",
    ),
    Mutant(
        "cache: the extension's key lacks PyTorch's version", "kernel_fusion/native/build.py",
        "cache.digest(torch.__version__, ", "cache.digest(",
        "tests/test_cache_keys.py::test_key_of_the_extension",
    ),
)

_PLANS = (
    Mutant(
        "planner: a slot has no room for what aligns a row", f"{_CUDA}/plan.py",
        "(16 if align < 16 else 0)", "0",
        "tests/test_cuda_kernels_offline.py::test_plans_are_sound",
    ),
    Mutant(
        "planner: a row ends within a vector", f"{_CUDA}/tree.py",
        "min(16 // ITEMSIZE[spec.x], spec.cols & -spec.cols)", "16 // ITEMSIZE[spec.x]",
        "tests/test_cuda_kernels_offline.py::test_plans_are_sound",
    ),
    Mutant(
        "planner: dweight and dbias are swapped in requests", "kernel_fusion/core/fields.py",
        "tuple(read(kind.kind, row) for _ in range(kind.length))",
        "tuple(read(kind.kind, row) for _ in range(kind.length))[::-1]",
        "tests/test_cuda_keys.py::test_keys_are_what_cpp_writes",
    ),
)

_OF_TRITON = (
    Mutant(
        "triton: another eps", f"{_TRITON}/row_norm_fwd.py",
        "= _moments(hs, col, num_cols, count, each, C)\n    rstd = reciprocal_sqrt(variance + C.eps)",
        "= _moments(hs, col, num_cols, count, each, C)\n    rstd = reciprocal_sqrt(variance + 2 * C.eps)",
        "tests/test_triton.py::test_within_budget",
    ),
    Mutant(
        "triton: a row ends one column late", f"{_TRITON}/row_norm_fwd.py",
        "tl.where(i * C.block + col < num_cols, deviation, 0.0)",
        "tl.where(i * C.block + col <= num_cols, deviation, 0.0)",
        "tests/test_triton.py::test_within_budget",
    ),
    Mutant(
        "triton: h is normalised before it is rounded", f"{_TRITON}/row_norm_tiles.py",
        "        h = h.to(other_ptr.dtype.element_ty).to(C.acc)\n", "",
        "tests/test_triton.py::test_h_is_normalised_as_it_is",
    ),
    Mutant(
        "triton: the second sum of a row is the first", f"{_TRITON}/row_norm_bwd.py",
        "return a0 + b0, a1 + b1", "return a0 + b0, a1 + b0",
        "tests/test_triton.py::test_within_budget",
    ),
    Mutant(
        "triton: the last partial row is skipped", f"{_TRITON}/reduce.py",
        "mask = (partial < num_partials) &", "mask = (partial < num_partials - 1) &",
        "tests/test_triton.py::test_within_budget",
    ),
    Mutant(
        "triton: relu loses NaN", f"{_TRITON}/activations.py",
        "return tl.where(x <= 0.0, 0.0, x)", "return tl.where(x > 0.0, x, 0.0)",
        "tests/test_triton.py::test_activations_take_nan_and_infinities_as_the_definition",
    ),
    Mutant(
        "triton: causal loses the diagonal", f"{_TRITON}/softmax.py",
        "(at <= diagonal)", "(at < diagonal)",
        "tests/test_triton.py::test_within_budget -k causal",
    ),
    Mutant(
        "triton: a stride of a view is ignored", f"{_TRITON}/rows.py",
        "(plane % middle) * (strides[1] * UNIT)", "(plane % middle) * (strides[2] * UNIT)",
        "tests/test_triton.py::test_within_budget -k transposed",
    ),
)

_OF_CPU = (
    Mutant(
        "cpu: eps is added after the root", f"{_EXTENSION}/cpu/row_norm_forward.h",
        "std::sqrt(variance + c.eps)", "(std::sqrt(variance) + c.eps)",
        "tests/test_oracle_grid.py::test_row_lengths",
    ),
    Mutant(
        "cpu: the last element of a tail is not stored", f"{_EXTENSION}/cpu/kernels/activation_loops.cpp",
        "memcpy(results[stored++], target.data, rest *", "memcpy(results[stored++], target.data, (rest - 1) *",
        "tests/test_oracle_pointwise.py::test_sizes",
    ),
    Mutant(
        "cpu: gradients of a product are swapped", f"{_EXTENSION}/cpu/kernels/activation_loops.cpp",
        "da = dz * b;\n      db = a * dz;", "da = a * dz;\n      db = dz * b;",
        "tests/test_oracle_pointwise.py::test_dtype_mixes",
    ),
    Mutant(
        "cpu: relu of 16-bit elements loses NaN", f"{_EXTENSION}/cpu/kernels/activation_loops.cpp",
        "(v > zero) | ((v > negative_infinity) & (v < zero))", "v > zero",
        "tests/test_oracle_pointwise.py::test_relu_takes_nan_of_either_sign",
    ),
    Mutant(
        "cpu: causal keeps a column more", f"{_EXTENSION}/cpu/kernels/softmax.cpp",
        "index % c.causal_rows + 1", "index % c.causal_rows + 2",
        "tests/test_oracle_softmax.py::test_causal",
    ),
    Mutant(
        "cpu: the parts of a long row are joined without their distance", f"{_EXTENSION}/cpu/moments.h",
        "squares += stretch.squares + shift * shift * (before * share);", "squares += stretch.squares;",
        "tests/test_oracle_grid.py::test_first_columns_far_off",
    ),
    Mutant(
        "cpu: backward of RMSNorm subtracts a mean", f"{_EXTENSION}/cpu/row_norm_backward.h",
        "c.rms ? 0 : row.sum_g / c.cols;", "row.sum_g / c.cols;",
        "tests/test_oracle_grid.py::test_row_lengths",
    ),
)

_OF_DISPATCHER = (
    Mutant(
        "autograd: dweight and dbias are swapped", f"{_EXTENSION}/row_norm_autograd.cpp",
        "list[1] = std::move(dweight);\n    if (wanted[2]) list[2] = std::move(dbias);",
        "list[1] = dbias;\n    if (wanted[2]) list[2] = dweight;",
        "tests/test_oracle_grid.py::test_dtype_mixes",
    ),
    Mutant(
        "autograd: weight_offset is ignored in backward", f"{_EXTENSION}/row_norm_autograd.cpp",
        "norm(call),", "norm{call, call.num_dims, 0.0, call.rms},",
        "tests/test_oracle_grid.py::test_weight_offset",
    ),
    Mutant(
        "autograd: the tangent of a bias is ignored", f"{_EXTENSION}/row_norm_autograd.cpp",
        "if (call.tensors(needs_definition) || !accepts(call)) {",
        "if (needs_definition(call.input, call.other(), call.weight, call.residual_gate()) || !accepts(call)) {",
        "tests/test_transforms.py::test_forward_mode",
    ),
    Mutant(
        "autograd: double backward lacks what arrives at h", f"{_EXTENSION}/row_norm_autograd.cpp",
        "const Tensor total = dh ? result[0].add(*dh) : result[0];", "const Tensor total = result[0];",
        "tests/test_stages_autograd.py::test_create_graph_gives_the_same_gradients",
    ),
    Mutant(
        "autograd: operands of other shapes share a gradient", f"{_EXTENSION}/pointwise_autograd.cpp",
        " && c.a.sym_sizes() == c.b->sym_sizes();", ";",
        "tests/test_oracle_pointwise.py::test_broadcasting",
    ),
    Mutant(
        "autograd: dropout's backward ignores how y lay", f"{_EXTENSION}/pointwise_autograd.cpp",
        "if (dy.strides().equals(strides)) return dy;", "if (!dy.is_contiguous()) return dy;",
        "tests/test_dropout.py::test_same_mask_for_cotangents_of_any_layout",
    ),
    Mutant(
        "operators: a stride of a view is ignored", f"{_EXTENSION}/operators.cpp",
        "t.stride(i) == size[levels - 1] * stride[levels - 1]", "t.stride(i) >= size[levels - 1] * stride[levels - 1]",
        "tests/test_oracle_grid.py::test_layouts",
    ),
    Mutant(
        "operators: dimensions with a gap are merged", f"{_EXTENSION}/reduce.cpp",
        "return strides[d] == strides[d + 1] * sizes[d + 1];", "return strides[d] >= strides[d + 1] * sizes[d + 1];",
        "tests/test_families_cpu.py::test_reductions_of_any_strides",
    ),
)

_OF_CUDA = (
    Mutant(
        "cuda: memory is read before the wait", f"{_KERNELS}/row_norm_bwd.cuh",
        "  const P at;\n  wait_for_previous_kernel();\n", "  const P at;\n",
        "tests/test_cuda_dependent_launch_offline.py::test_no_access_before_the_wait",
    ),
    Mutant(
        "cuda: a row is read before the wait", f"{_KERNELS}/row_executors.cuh",
        "wait_for_previous_kernel();\n  const DynamicPlace<S> at(static_cast<int>(args.cols));\n"
        "  const i64 wanted = static_cast<i64>(blockIdx.x / S::kCluster)",
        "const DynamicPlace<S> at(static_cast<int>(args.cols));\n"
        "  const i64 wanted = static_cast<i64>(blockIdx.x / S::kCluster)",
        "tests/test_cuda_dependent_launch_offline.py::test_no_access_before_the_wait",
    ),
)

_ON_A_GPU = (
    Mutant(
        "cuda: weight_offset is ignored in backward", f"{_KERNELS}/gradients.cuh",
        "widen_weight<S>(pack, offset, v);", "widen_pack(pack, v);",
        "tests/test_oracle_grid.py::test_weight_offset", cuda=True,
    ),
    Mutant(
        "cuda: a row ends one vector late", f"{_KERNELS}/moments.cuh",
        "k * P::kChunk + lane * S::kVec < P::cols_of(warp)", "k * P::kChunk + lane * S::kVec <= P::cols_of(warp)",
        "tests/test_oracle_grid.py::test_values", cuda=True,
    ),
    Mutant(
        "cuda: the mean that is kept is that of a warp", f"{_KERNELS}/row_norm_fwd.cuh",
        "squares * kPerCol<S> + static_cast<A>(args.eps));\n"
        "  if (S::kStats && row.live && at.leader()) store_stats<S>(args, row.index, mean, rstd);",
        "squares * kPerCol<S> + static_cast<A>(args.eps));\n"
        "  if (S::kStats && row.live && at.leader()) store_stats<S>(args, row.index, moments.mean, rstd);",
        "tests/test_cuda_executors.py::test_f32_weight_beside_bf16", cuda=True,
    ),
    Mutant(
        "cuda: dresidual lacks what arrives at h", f"{_KERNELS}/gradients.cuh",
        "if constexpr (kPresent<typename S::DH>) {", "if constexpr (kPresent<typename S::DH> && !S::kDResidual) {",
        "tests/test_oracle_stages.py::test_dtype_mixes", cuda=True,
    ),
    Mutant(
        "cuda: bits of slopes are inverted", f"{_KERNELS}/pointwise_chain.cuh",
        "slope == Act::template slope<M>(A(1))", "slope != Act::template slope<M>(A(1))",
        "tests/test_cuda_families.py::test_gradients_by_bits", cuda=True,
    ),
    Mutant(
        "cuda: causal keeps a column more", f"{_KERNELS}/softmax.cuh",
        "kept = static_cast<int>(place) + 1;", "kept = static_cast<int>(place) + 2;",
        "tests/test_cuda_families.py::test_masks", cuda=True,
    ),
    Mutant(
        "cuda: the last partial row is skipped", f"{_KERNELS}/sum_partials.cuh",
        "static_cast<int>(args.num_partials), kDepth,", "static_cast<int>(args.num_partials) - 1, kDepth,",
        "tests/test_cuda_executors.py::test_f32_weight_beside_bf16", cuda=True,
    ),
    Mutant(
        "cuda: the stride of an operand is ignored", f"{_KERNELS}/operands.cuh",
        "return first + e * args.stride[0][kSlot];", "return first + e;",
        "tests/test_cuda_families.py::test_layouts", cuda=True,
    ),
    Mutant(
        "cuda: bf16 is cut off instead of rounded", f"{_KERNELS}/vectors.cuh",
        "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32",
        "tests/test_oracle_stages.py::test_h_is_rounded_once_and_normalised_as_it_is", cuda=True,
    ),
    Mutant(
        "cuda: the tail of a reduced row is skipped", f"{_KERNELS}/reduce_rows.cuh",
        "if (v == vectors && tail)", "if (v < vectors && tail)",
        "tests/test_cuda_families.py::test_reductions", cuda=True,
    ),
    Mutant(
        "autocast: a norm returns the dtype of its input", f"{_EXTENSION}/row_norm_autograd.cpp",
        "!call.out_dtype && narrow && is_widened(rms)", "false",
        "tests/test_compile.py::test_autocast_dtypes", cuda=True,
    ),
)
# fmt: on

MUTANTS = (
    *_DEFINITION, *_LAYERS, *_CACHES, *_PLANS, *_OF_TRITON, *_OF_CPU, *_OF_DISPATCHER, *_OF_CUDA, *_ON_A_GPU
)  # fmt: skip
