#!/usr/bin/env bash
# Makes the environment in which SGLang serves on a CPU: environment.sh PYTHON FOLDER. Anything in FOLDER is replaced.
set -euo pipefail
python=$1 folder=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../../..

"$python" -m venv --clear "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt")
"${pip[@]}" -e "$root" # brings torch, triton and the plugin's entry point
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar==0.2.7
"${pip[@]}" -r "$here/requirements.txt"
# torchvision's operators are built for another torch than a CPU one, and SGLang only needs its Python part.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
: >"$site/torchvision/_meta_registrations.py"
