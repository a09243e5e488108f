"""The image and the compose file without a container engine: both are linted, and every command in them is run.

A folder stands for the image: its paths are mapped into it, and its Python is a fresh environment that finds the packages of
this one, so that only moe_dist is installed anew. Scripts stand for what the base images bring. An instruction that the
test does not know is an error, so that none goes unrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_server import BINARY, dies_with_parent, free_port
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PASSWORD = "5ecret0fTheTest"
DEADLINE_S = 240.0  # of one command, on a machine that is busy; a hang is longer

# Speaks to the server as the real one does: prints what the server says, and exits with 0 also where that is an error.
REDIS_CLI = f"""#!{sys.executable}
import os, sys, redis
client = redis.Redis(port=int(os.environ["TEST_PORT"]), password=os.environ.get("REDISCLI_AUTH"), socket_timeout=10)
try:
    answer = client.execute_command(*sys.argv[1:])
    print({{True: "PONG"}}.get(answer, answer))
except redis.ConnectionError as error:
    print("AUTH failed:" if isinstance(error, redis.AuthenticationError) else "Could not connect:", error)
    sys.exit(not isinstance(error, redis.AuthenticationError))
"""


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def compose(**environ: str) -> dict[str, Any]:
    """The compose file with its variables filled in."""

    def fill(variable: re.Match[str]) -> str:
        if value := environ.get(variable["name"]):
            return value
        if variable["rule"] == ":?":
            raise KeyError(f"{variable['name']}: {variable['rest']}")
        return variable["rest"]

    text = re.sub(r"\$\{(?P<name>\w+)(?P<rule>:[-?])(?P<rest>[^}]*)\}", fill, (DOCKER / "compose.yaml").read_text())
    assert "$" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE), "a form of variable that this test does not know"
    document: dict[str, Any] = YAML(typ="safe").load(text)
    return document


def run_tool(name: str, *arguments: str) -> tuple[int, str]:
    ended = subprocess.run(
        [f"{sysconfig.get_path('scripts')}/{name}", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return ended.returncode, ended.stdout


def test_the_dockerfile_is_linted() -> None:
    assert run_tool("hadolint", str(DOCKER / "Dockerfile")) == (0, "")


def test_the_linter_would_object(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /src && pip install redis\n")
    code, said = run_tool("hadolint", str(tmp_path / "Dockerfile"))
    assert code == 1
    assert {"DL3003", "DL3006", "DL3013", "DL3042"} <= set(re.findall(r"DL\d{4}", said))


def test_the_compose_file_is_of_its_format(tmp_path: Path) -> None:
    check = ["--builtin-schema", "vendor.compose-spec"]
    assert run_tool("check-jsonschema", *check, str(DOCKER / "compose.yaml"))[0] == 0
    (tmp_path / "compose.yaml").write_text((DOCKER / "compose.yaml").read_text().replace("depends_on:", "depends:"))
    code, said = run_tool("check-jsonschema", *check, str(tmp_path / "compose.yaml"))
    assert code == 1
    assert "'depends' was unexpected" in said


def test_a_compose_file_without_a_password_is_refused() -> None:
    with pytest.raises(KeyError, match="REDIS_PASSWORD"):
        compose()


def test_the_base_is_a_python_that_the_project_supports_and_what_starts_is_not_root() -> None:
    found = instructions()
    (base,) = [rest for name, rest in found if name == "FROM"]
    version = re.fullmatch(r"python:3\.(\d+)-slim", base)
    assert version, base
    assert 11 <= int(version[1]) <= 13
    last = max(at for at, (name, _) in enumerate(found) if name in ("RUN", "COPY"))
    (user,) = [rest for name, rest in found[last:] if name == "USER"]
    assert user not in ("0", "root")


class Image:
    """A folder that stands for the image's file system, made by the instructions of the Dockerfile."""

    def __init__(self, root: Path, context: Path, build_args: Mapping[str, str]) -> None:
        self.root, self.user, self.workdir = root, "root", "/"
        self.command: list[str] = []
        for name in ("passwd", "group", "shadow", "gshadow"):
            write(root / "etc" / name, "")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "python")], check=True)
        self.packages = next((root / "python/lib").glob("python3.*/site-packages"))
        write(self.packages / "outside.pth", sysconfig.get_path("purelib"))
        for name, module in (("pip", "pip"), ("torchrun", "torch.distributed.run")):  # commands of packages that are found outside
            write(root / "shims" / name, f'#!/bin/sh\nexec {root}/python/bin/python -m {module} "$@"\n')
        as_root = "" if os.geteuid() == 0 else "unshare --map-root-user "
        write(root / "shims/useradd", f'#!/bin/sh\nexec {as_root}/usr/sbin/useradd --prefix {root} "$@"\n')
        variables = {}
        for name, rest in instructions():
            match name:
                case "FROM":
                    pass
                case "ARG":
                    variables[rest] = build_args[rest]
                case "USER":
                    self.user = rest
                case "WORKDIR":
                    self.workdir = rest
                    self.path(".").mkdir(parents=True, exist_ok=True)
                case "COPY":
                    *sources, target = rest.split()
                    for source in sources:
                        copy(context / source, self.path(target))
                case "RUN":
                    code, said = self.run(["sh", "-c", rest], **variables)
                    assert code == 0, f"RUN {rest}\n{said}"
                case "CMD":
                    self.command = json.loads(rest)
                case _:
                    raise AssertionError(f"this test does not run the instruction {name}")

    def path(self, inside: str) -> Path:
        return self.root / os.path.join(self.workdir, inside).lstrip("/")

    def home(self) -> Path:
        users = [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]
        return self.root / next((home for name, _, uid, _, _, home, _ in users if self.user in (name, uid)), "/root").lstrip("/")

    def run(self, command: list[str], **environ: str) -> tuple[int, str]:
        """Of this process's environment it sees where temporary files go, and what pip was told."""
        kept = {name: value for name, value in os.environ.items() if name == "TMPDIR" or name.startswith("PIP_")}
        kept |= {"PATH": f"{self.root}/python/bin:{self.root}/shims:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home()), **environ}
        ended = subprocess.run(
            command, cwd=self.path("."), env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S
        )
        return ended.returncode, ended.stdout


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def build_context(folder: Path) -> Path:
    """What the ignore file lets through to the builder: everything is out but what is named."""
    first, *rules = [line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert (first, rules.pop()) == ("*", "**/__pycache__")
    folder.mkdir()
    for rule in rules:
        source = ROOT / rule.removeprefix("!")
        assert rule.startswith("!"), rule
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    return folder


@contextlib.contextmanager
def running_redis(service: dict[str, Any], configs: dict[str, Any], folder: Path, port: int) -> Iterator[dict[str, str]]:
    """The service's command over its configuration and volume, on a free port of this machine; yields what its processes see."""
    write(folder / "bin/redis-server", f'#!/bin/sh\nexec {BINARY} "$@" --port {port} --bind 127.0.0.1\n')
    write(folder / "bin/redis-cli", REDIS_CLI)
    command = list(service["command"])
    for config in service["configs"]:
        write(folder / config["target"].lstrip("/"), configs[config["source"]]["content"])
        command = [word.replace(config["target"], str(folder / config["target"].lstrip("/"))) for word in command]
    (volume,) = service["volumes"]
    assert volume.endswith(":/data")  # the working folder of the base image
    (folder / "data").mkdir(exist_ok=True)
    environ = {**service["environment"], "PATH": f"{folder}/bin:/usr/bin:/bin", "TEST_PORT": str(port)}
    server = subprocess.Popen(dies_with_parent(command), cwd=folder / "data", env=environ, stdout=subprocess.DEVNULL)
    try:
        yield environ
    finally:
        server.terminate()
        server.wait(60)


def healthy(service: dict[str, Any], environ: Mapping[str, str]) -> bool:
    kind, command = service["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    return subprocess.run(["sh", "-c", command], env=environ, timeout=DEADLINE_S).returncode == 0


def wait_until_healthy(service: dict[str, Any], environ: Mapping[str, str]) -> None:
    check = service["healthcheck"]
    for _ in range(check["retries"]):
        if healthy(service, environ):
            return
        time.sleep(float(check["interval"].removesuffix("s")))
    raise AssertionError("the server did not become healthy")


@pytest.mark.timeout(900)
def test_every_command_runs(tmp_path: Path) -> None:
    """The image is built, says what it can run, and tunes twice through a server that is restarted in between."""
    document = compose(REDIS_PASSWORD=PASSWORD)
    service, tune = document["services"]["redis"], document["services"]["tune"]
    assert set(document["services"]) == {"redis", "tune"}
    assert ((DOCKER / tune["build"]["context"]).resolve(), tune["build"]["dockerfile"]) == (ROOT, "docker/Dockerfile")
    assert tune["depends_on"] == {"redis": {"condition": "service_healthy"}}

    image = Image(tmp_path / "image", build_context(tmp_path / "context"), tune["build"]["args"])
    made = set(image.root.rglob("*"))
    code, said = image.run(image.command)
    assert code == 0, said
    assert "moe-dist 0.1.0" in said
    assert "written, read back and removed a value" in said
    code, said = image.run(["python", "-c", "import moe_dist, moe_dist_kernels, sys; print(moe_dist.__file__, moe_dist_kernels.__path__)"])
    assert said.count(str(image.packages)) == 2, said  # what was installed is what runs, not this working tree

    port = free_port()
    command = shlex.split(tune["command"])
    ran = dict(tune["environment"], MOE_DIST_STORE=tune["environment"]["MOE_DIST_STORE"].replace("@redis:6379", f"@127.0.0.1:{port}"))
    assert str(port) in ran["MOE_DIST_STORE"]
    for wanted in ("0 hits of 2; no keys differ between 2 ranks", "measured nothing: all 2 winners came from"):
        with running_redis(service, document["configs"], tmp_path / "redis", port) as environ:
            wait_until_healthy(service, environ)
            assert not healthy(service, {**environ, "REDISCLI_AUTH": "another"})
            code, said = image.run(command, **ran)
            assert code == 0, said
            assert wanted in said
            assert f"redis://127.0.0.1:{port}/0;" in said or said.rstrip().endswith(f"kept in redis://127.0.0.1:{port}/0")
            assert PASSWORD not in said
            with redis.Redis(port=port, password=PASSWORD) as client:
                names = [name.decode() for name in client.scan_iter()]
            assert len([name for name in names if name.startswith("moe_dist:{entries/")]) == 2
            assert [name for name in names if name.startswith("moe_dist:{epochs/")]
    assert not healthy(service, environ)
    outside = [
        path for path in set(image.root.rglob("*")) - made if image.home() not in (path, *path.parents) and "__pycache__" not in str(path)
    ]
    assert outside == []  # the image's user writes at home alone
