#!/usr/bin/env bash
# Packs the frameworks of this folder for a machine without network: Python 3.12, torch 2.11, Linux x86-64.
#   benchmarks/peers/pack.sh OUT [NAME ...]     NAME: ray common trl verl transformers openrlhf; default: all
# writes OUT/NAME.tar.xz. There, unpack each into its own folder and put the folders on PYTHONPATH:
#   trl: trl common      verl: transformers verl ray common      openrlhf: openrlhf ray common and stand_in
# Not packed, because such a machine has them: torch, transformers 5.17, accelerate, peft, numpy, pandas,
# pyarrow, and vLLM 0.24.0 with its dependencies.
set -euo pipefail

out=$(mkdir -p "${1:?folder for the packed files}" && cd "$1" && pwd)
shift
names=("$@")
[ $# -gt 0 ] || names=(ray common trl verl transformers openrlhf)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip="$work/venv/bin/pip"
"$pip" install -q -U pip setuptools wheel
platforms=(--platform manylinux2014_x86_64)
for glibc in 2_17 2_27 2_28 2_31 2_34 2_35; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done

# Wheels for Python 3.12, without dependencies: the lists below are complete.
get() {
  "$pip" install -q --no-compile --no-deps --target "$work/$1" --python-version 3.12 --only-binary=:all: \
    "${platforms[@]}" "${@:2}"
}

# Packages of pure Python that have no wheel, or one with the tag of another Python.
build() {
  DS_BUILD_OPS=0 "$pip" wheel -q --no-deps --no-build-isolation -w "$work/wheels" "${@:2}"
  local wheel
  for wheel in "$work"/wheels/*.whl; do
    "$work/venv/bin/python" -m zipfile -e "$wheel" "$work/$1"
  done
  rm -r "$work/wheels"
}

strip_and_pack() {
  find "$work/$1" \( -name __pycache__ -o -name tests -o -name test -o -name '*.pyi' \) -prune \
    -exec rm -rf {} +
  rm -rf "$work/$1/bin" "$work/$1/share"
  tar cf - -C "$work/$1" . | xz -3 -T0 > "$out/$1.tar.xz"
  du -m "$out/$1.tar.xz"
}

for name in "${names[@]}"; do
  case "$name" in
    ray)
      get ray ray==2.55.0 msgpack==1.2.4 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 \
        referencing==0.37.0 rpds-py==2026.9.1 attrs==26.1.0
      # Neither framework uses what stands on top of Ray's core, nor its page.
      (cd "$work/ray/ray" && rm -rf jars rllib serve tune train data llm workflow air cpp dashboard/client)
      ;;
    common)
      get common datasets==5.2.0 multiprocess==0.70.19 xxhash==4.1.0 dill==0.4.1 torchdata==0.11.0 \
        pylatexenc==2.11 psutil==7.2.2 einops==0.8.2 cloudpickle==3.1.2 uvloop==0.22.1 py-cpuinfo==9.0.0
      ;;
    trl) get trl trl==1.16.0 ;;
    verl)
      get verl verl==0.9.1 tensordict==0.10.0 TransferQueue==0.1.11 codetiming==1.4.0 hydra-core==1.3.2 \
        omegaconf==2.3.0 orjson==3.13.0 pyvers==0.2.3 importlib_metadata==10.2.0 zipp==4.1.2 \
        prometheus_client==0.26.0
      build verl antlr4-python3-runtime==4.9.3
      ;;
    transformers) get transformers transformers==5.9.0 tokenizers==0.22.2 ;; # verl asks for less than 5.11
    openrlhf)
      get openrlhf hjson==3.1.0 py-cpuinfo==9.0.0 nvidia-ml-py==13.615.71 pynvml==13.0.1 jsonlines==4.0.0 \
        loralib==0.1.2 optree==0.20.0 torchmetrics==1.9.0 lightning-utilities==0.15.3
      build openrlhf deepspeed==0.19.6
      "$pip" download -q --no-deps -d "$work/wheels" --platform manylinux1_x86_64 --python-version 3.11 \
        --only-binary=:all: openrlhf==0.11.2
      "$work/venv/bin/python" -m zipfile -e "$work"/wheels/openrlhf-*.whl "$work/whole"
      # The wheel has the tag of Python 3.11 and only Python files in it.
      cp -r "$work"/whole/*.data/purelib/openrlhf "$work"/whole/*.dist-info "$work/openrlhf/"
      ;;
    *)
      echo "unknown: $name" >&2
      exit 2
      ;;
  esac
  strip_and_pack "$name"
done
