"""The house rules: which room may import which, what `import moe_dist` may load, and what no file may name."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "moe_dist": ROOT / "moe_dist",
    "moe_dist_kernels": ROOT / "kernels/moe_dist_kernels",
    "moe_dist_vllm": ROOT / "plugins/vllm/moe_dist_vllm",
    "moe_dist_sglang": ROOT / "plugins/sglang/moe_dist_sglang",
}

# Room -> rooms that it may import. A room is a module or a package with all below it; the longest name that fits a module
# is its room, and a room may always import itself. Arrows point down: a room listed later may use earlier ones.
LEAVES = ("moe_dist.errors", "moe_dist.config", "moe_dist.process", "moe_dist.tuning.problem", "moe_dist.versions")
TUNER_PARTS = (
    "moe_dist.tuning.policy",
    "moe_dist.tuning.identity",
    "moe_dist.tuning.measure",
    "moe_dist.tuning.search",
    "moe_dist.tuning.journal",
    "moe_dist.tuning.probe",
    "moe_dist.tuning.pins",
    "moe_dist.stores",
    "moe_dist.distributed",
)
PASS_PARTS = (
    "moe_dist.tuning.pass_terms",
    "moe_dist.tuning.misses",
    "moe_dist.tuning.adoption",
    "moe_dist.tuning.rounds",
    "moe_dist.tuning.apart",
)
CORE = (
    *LEAVES,
    *TUNER_PARTS,
    "moe_dist.tensors",
    "moe_dist.backends",
    "moe_dist.checks",
    "moe_dist.operation",
    "moe_dist.tuning",
    "moe_dist.trace",
    "moe_dist.layer",
    "moe_dist.allreduce",
)
ARROWS: dict[str, tuple[str, ...]] = {
    "moe_dist.errors": (),
    "moe_dist.process": (),
    "moe_dist.versions": (),
    "moe_dist.settings": ("moe_dist.errors",),
    "moe_dist.config": ("moe_dist.errors",),
    "moe_dist.tensors": ("moe_dist.backends.registry",),  # `prepare_for` reaches up to the layout helper, inside the call
    "moe_dist.tuning.problem": ("moe_dist.errors",),
    "moe_dist_kernels": (),
    "moe_dist.backends": (*LEAVES, "moe_dist.tensors", "moe_dist_kernels"),
    # None of the tuner's parts imports another. A policy is a word of the others: how time is taken.
    "moe_dist.tuning.policy": LEAVES,
    **dict.fromkeys(TUNER_PARTS[1:], (*LEAVES, "moe_dist.tuning.policy")),
    # A pass, from its words up; then tuner.py and context.py.
    "moe_dist.tuning.pass_terms": (*LEAVES, *TUNER_PARTS),
    "moe_dist.tuning.misses": (*LEAVES, *TUNER_PARTS),
    "moe_dist.tuning.adoption": (*LEAVES, *TUNER_PARTS, "moe_dist.tuning.pass_terms", "moe_dist.tuning.misses"),
    "moe_dist.tuning.rounds": (*LEAVES, *TUNER_PARTS, "moe_dist.tuning.pass_terms", "moe_dist.tuning.adoption"),
    "moe_dist.tuning.apart": (*LEAVES, *TUNER_PARTS, "moe_dist.tuning.pass_terms", "moe_dist.tuning.rounds"),
    "moe_dist.tuning.tune_pass": (*LEAVES, *TUNER_PARTS, *PASS_PARTS),
    "moe_dist.tuning": (*LEAVES, *TUNER_PARTS, *PASS_PARTS, "moe_dist.tuning.tune_pass", "moe_dist.settings"),
    "moe_dist.checks": (*LEAVES, "moe_dist.tensors", "moe_dist.backends"),
    "moe_dist.operation": (*LEAVES, "moe_dist.tensors", "moe_dist.backends", "moe_dist.checks", "moe_dist.tuning.probe"),
    "moe_dist.trace": (*LEAVES, "moe_dist.tensors", "moe_dist.backends", "moe_dist.tuning.identity"),
    "moe_dist.layer": (
        *LEAVES,
        "moe_dist.tensors",
        "moe_dist.backends",
        "moe_dist.checks",
        "moe_dist.operation",
        "moe_dist.tuning",
        "moe_dist.trace",
    ),
    "moe_dist.allreduce": (
        *LEAVES,
        "moe_dist.backends.base",
        "moe_dist.distributed.symmetric",
        "moe_dist.operation",
        "moe_dist.tuning",
    ),
    "moe_dist.serving": (*CORE, "moe_dist.settings"),
    "moe_dist.interop": (*LEAVES, "moe_dist.backends"),
    "moe_dist.framework": ("moe_dist.interop", "moe_dist.serving", "moe_dist.settings", "moe_dist.stores.open"),
    "moe_dist.bench": (*CORE, "moe_dist.interop", "moe_dist.settings"),
    "moe_dist.repro": (*CORE, "moe_dist.bench.components"),
    "moe_dist.cli": (*CORE, "moe_dist.interop", "moe_dist.settings", "moe_dist.bench", "moe_dist"),
    "moe_dist.tune": ("moe_dist.cli",),
    "moe_dist": (*CORE, "moe_dist.bench.components", "moe_dist.repro"),  # the public names
    **dict.fromkeys(
        ("moe_dist_vllm", "moe_dist_sglang"),
        ("moe_dist", "moe_dist.serving", "moe_dist.settings", "moe_dist.framework", "moe_dist.interop"),
    ),
    "moe_dist_sglang.bench": (  # times as the core's benchmark of kernels does
        "moe_dist",
        "moe_dist.serving",
        "moe_dist.bench",
        "moe_dist.tuning.identity",
        "moe_dist.tuning.measure",
        "moe_dist.tuning.policy",
        "moe_dist_sglang",
    ),
}
LIGHT = ("triton", "redis", "vllm", "sglang")  # what the core's import never loads


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """(imported module, line) of every import statement of ours, wherever it stands in the file."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` names a module; `from module import name` does not.
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        else:
            continue
        yield from ((target, node.lineno) for target in targets if target.split(".")[0] in PACKAGES)


def room(module: str) -> str:
    """The longest name in ARROWS that `module` is or lies in. The root package holds its own `__init__` alone."""
    fits = [name for name in ARROWS if module == name or (name != "moe_dist" and module.startswith(name + "."))]
    assert fits, f"{module} lies in no room: add it to ARROWS, and to docs/architecture.md"
    return max(fits, key=len)


def may(importer: str, imported: str) -> bool:
    home = room(importer)
    if room(imported) == home:
        return True
    return any(imported == allowed or (allowed != "moe_dist" and imported.startswith(allowed + ".")) for allowed in ARROWS[home])


def test_every_room_of_the_table_holds_something() -> None:
    assert set(ARROWS) == {room(module) for module in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_down_only(name: str) -> None:
    wrong = [f"line {line}: {name} imports {target}" for target, line in imports(name, MODULES[name]) if not may(name, target)]
    assert not wrong, "\n".join(wrong)


def test_arrow_rule_tells_allowed_from_forbidden() -> None:
    # One of each kind that DESIGN-like arrows speak of: down, self, sideways between the tuner's parts, up, past the public names.
    assert may("moe_dist.layer", "moe_dist.backends.registry")
    assert may("moe_dist.stores.redis", "moe_dist.stores.base")
    assert not may("moe_dist.tuning.measure", "moe_dist.stores.base")
    assert not may("moe_dist.distributed.plan", "moe_dist.tuning.search")
    assert not may("moe_dist.backends.reference", "moe_dist.layer")
    assert not may("moe_dist.tuning.tuner", "moe_dist_kernels")
    assert may("moe_dist_vllm", "moe_dist")
    assert not may("moe_dist_vllm", "moe_dist.layer")


def test_only_settings_reads_the_environment() -> None:
    readers = [
        f"{name}:{node.lineno}"
        for name, path in MODULES.items()
        if name != "moe_dist.settings" and name.split(".")[0] == "moe_dist"
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {alias.name for alias in node.names} & {"environ", "getenv"})
    ]
    assert not readers


def test_import_is_light_and_touches_no_device() -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import moe_dist; "
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    loaded, initialized = json.loads(done.stdout)
    assert "moe_dist" in loaded
    assert not [name for name in loaded if name.split(".")[0] in (*LIGHT, "moe_dist_kernels")]
    assert not initialized


def texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            try:
                yield name, path.read_text()
            except UnicodeDecodeError:
                continue


# Written so that no pattern matches itself.
NEVER_NAMED = {
    "a machine's path": re.compile(r"(?<![\w.~-])/(?:work|root|home/\w+|Users/\w+|farm)(?:/|\b(?!\w))(?=[\w./-])"),
    "a registry's host": re.compile(
        r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|npmjs[.]org|deb[.]debian[.]org|anaconda[.]org|crates[.]io|hub[.]docker[.]com"
    ),
}


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    found = [
        f"{name}: {what}: {match.group()!r}"
        for name, text in texts()
        for what, pattern in NEVER_NAMED.items()
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see /" + "work/x", "a machine's path"),
        ("/" + "root/y", "a machine's path"),
        ("https://" + "pypi" + ".org/simple", "a registry's host"),
    ],
)
def test_forbidden_names_are_recognised(text: str, what: str) -> None:
    assert NEVER_NAMED[what].search(text)
