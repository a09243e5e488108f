#!/usr/bin/env bash
# Packs SGLang 0.5.23 for a machine with CUDA and without a network, whose Python 3.12 has torch 2.11: pack_site.sh FOLDER makes
# FOLDER/piece.0, .1, ... of at most 60 MB. There: cat FOLDER/piece.* | xz -T0 -dc | tar xf - -C SITE, then PYTHONPATH=SITE and the
# variables of docs/sglang.md. What that machine has already is not packed: see WHEELS.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The newest kernel package whose symbols torch 2.11 has; SGLang asks for a later one, unless SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK is set.
KERNELS=sglang-kernel==0.4.6
# Beside torch, torchvision, triton, aiohttp, einops, numpy, pillow, psutil, requests, rich, sentencepiece, tokenizers, tqdm, uvloop and their needs.
WHEELS=(
  sglang==0.5.23 transformers==5.19.0 compressed-tensors==0.18.0 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 openai==2.8.0
  annotated-types==0.8.0 asttokens==3.0.2 cffi==2.1.1 dill==0.4.1 distro==1.9.0 executing==2.3.0 fastapi==0.165.0 gguf==0.19.0
  ipython==9.18.1 ipython-pygments-lexers==1.1.1 jedi==0.20.1 jiter==0.19.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1
  loguru==0.7.3 matplotlib-inline==0.2.2 msgspec==0.23.0 opentelemetry-api==1.45.2 orjson==3.13.0 parso==0.8.7 partial-json-parser==0.2.1.1.post7 pexpect==4.9.0
  prompt-toolkit==3.0.53 ptyprocess==0.7.0 pure-eval==0.2.4 pybase64==1.5.1 pycparser==3.12 pydantic==2.14.4 pydantic-core==2.50.5
  python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 soundfile==0.14.0
  stack-data==0.6.3 starlette==1.10.0 traitlets==5.16.1 typing-inspection==0.4.5 uvicorn==0.54.0 wcwidth==0.9.4
)

platforms=(any manylinux1_x86_64 manylinux2014_x86_64)
for glibc in 5 12 17 24 26 27 28 31 34 35; do platforms+=("manylinux_2_${glibc}_x86_64"); done
download() { # FOLDER REQUIREMENT...
  "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]/#/--platform=}" --dest "$@"
}
download "$work/kernels" "$KERNELS"
download "$work/wheels" "${WHEELS[@]}"

for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
# Of the kernels: what Hopper runs, and the libraries of no attention that SGLang has in Triton too, 1.1 GB of the whole.
unzip -q -o "$work"/kernels/*.whl -d "$work/site" -x '*/sm100/*' '*/flash_ops.*' '*/flashmla_ops.*' '*/infllm_ops.*'
cd "$work/site"
# Image and video models, SGLang's own tests, and settings of other cards' kernels.
rm -rf sglang/multimodal_gen sglang/test sglang/benchmark
find . -name __pycache__ -prune -exec rm -rf {} +
find sglang -path '*/configs/*' -name '*.json' -name '*device_name=*' ! -name '*NVIDIA_H[12]00*' -delete

rm -f "$out"/piece.*
tar cf - . | xz -T0 -6 | split -b 60000000 -d -a 1 - "$out/piece."
ls -l "$out"
