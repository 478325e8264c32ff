#!/usr/bin/env bash
# Everything a GPU is needed for, in one go: build, test, check under compute-sanitizer, measure.
#   benchmarks/run_on_gpu.sh OUTPUT_DIR [tests] [faults] [sanitize] [bench] [peers] [steps] [profile] [experiments] [training] [example] [report]
# (default: all); `report` is about what `bench` and `peers` left in OUTPUT_DIR. `steps` and `training` take long; their
# parts have names, too: steps-llama-3-8b and so on, training-0, training-1.
# Uses the python3 at hand, which must hold PyTorch with CUDA; results and logs land in OUTPUT_DIR.
set -uo pipefail
out=$1
shift
parts=${*:-tests faults sanitize bench peers steps profile experiments training example report}
mkdir -p "$out"
cd "$(dirname "$0")/.."
python3 -m pip install -q --no-build-isolation --no-deps -e . -e ./bench 2>/dev/null || export PYTHONPATH=$PWD:$PWD/bench
export PYTHONUNBUFFERED=1
failed=0
run() { # name, command...
  local name=$1 start=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  local status=$?
  echo "$name: exit $status after $((SECONDS - start)) s"
  [ $status -eq 0 ] || failed=1
}
python3 -c 'import kernel_fusion as kf; assert kf.EXTENSION_LOADED and kf.CUDA_AVAILABLE' || exit 1
for part in $parts; do
  case $part in
    tests)
      python3 -c 'import expecttest, hypothesis, xdist' || exit 1  # without the first, 42 tests only fail
      run tests python3 -m pytest -q -m cuda -p no:benchmark -n 8 --maxfail 60 tests && tail -n 1 "$out/tests.log"
      ;;
    faults) run faults python3 tests/mutants.py --cuda --output "$out/mutants.json" ;;
    sanitize)
      for tool in memcheck racecheck initcheck; do
        run "sanitize-$tool" compute-sanitizer --tool $tool --error-exitcode 9 python3 tests/sanitize.py \
          $([ $tool = racecheck ] && echo --every-lane-arrives)
      done
      ;;
    bench)
      run bench python3 -m kernel_fusion bench models host memory --device cuda --output-dir "$out"
      run bench-shapes python3 -m kernel_fusion bench large odd few-rows --device cuda --directions forward,backward \
        --output-dir "$out"
      run bench-sweep python3 -m kernel_fusion bench sweep --device cuda --output-dir "$out"
      run bench-operations python3 -m kernel_fusion bench relu-layernorm fused-ops --device cuda --output-dir "$out"
      run bench-f32-weights python3 -m kernel_fusion bench large models --device cuda --dtypes bf16 --weights fp32 \
        --verbs layer_norm --directions forward,backward --output-dir "$out/fp32-weights"
      ;;
    peers)
      run peers python3 -m kernel_fusion bench large models sweep --device cuda --dtypes bf16 --backends cuda,triton \
        --directions forward,backward --peers torch.compile,liger,quack,flash-attn --output-dir "$out/peers"
      run peers-stages python3 -m kernel_fusion bench stages rope quantised --device cuda --dtypes bf16 --output-dir "$out/peers"
      ;;
    profile)
      for case in layer_norm rms_norm; do
        run "profile-$case" python3 -m kernel_fusion profile $case --device cuda --output-dir "$out/profile-$case"
      done
      ;;
    experiments) run experiments python3 benchmarks/experiments.py --output-dir "$out" ;;
    steps)
      for model in $(python3 -c 'from kernel_fusion_bench.step_models import ARCHITECTURES; print(*ARCHITECTURES)'); do
        benchmarks/run_on_gpu.sh "$out" "steps-$model" || failed=1
      done
      ;;
    steps-*) # one model: its steps, and what kernels they run
      model=${part#steps-}
      run "$part" python3 -m kernel_fusion bench steps --verbs "$model" --device cuda --peers torch.compile,liger \
        --output-dir "$out/steps/$model"
      run "profile-$model" python3 benchmarks/step_profile.py --model "$model" --output-dir "$out/steps"
      grep '^|' "$out/steps/$model/steps.md"
      ;;
    training) benchmarks/run_on_gpu.sh "$out" training-0 training-1 || failed=1 ;;
    training-*) # a seed, with and without us, each twice
      run "$part" python3 benchmarks/training_run.py --seeds "${part#training-}" --repeat --output-dir "$out/training"
      tail -n 12 "$out/$part.log"
      ;;
    report)
      results=()
      for suite in models large odd few-rows sweep host relu-layernorm fused-ops memory peers/{large,models,sweep}; do
        [ -f "$out/$suite.json" ] && results+=("$out/$suite.json")
      done
      run report python3 -m kernel_fusion report "${results[@]}" --output "$out/report.html"
      ;;
    example) run example python3 examples/train_gpt.py --device cuda --output-dir "$out" ;;
  esac
done
exit $failed
