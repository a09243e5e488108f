"""Whether a framework's package has the names that a plugin needs: read from its source files, so that nothing is imported.

Owns the reading. What is needed is the plugin's own list; the plugins alone use this.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Need:
    """module: below the package, with dots. symbol: a name, or Class.name, which may be what its methods set on self.

    parameters: those that a function must have, in this order.
    """

    module: str
    symbol: str
    parameters: tuple[str, ...] = ()


def members(module: str, owner: str, *names: str) -> tuple[Need, ...]:
    """A need for each of a class's `names`."""
    return tuple(Need(module, f"{owner}.{name}") for name in names)


def package_root(package: str) -> Path | None:
    """The folder of an installed package; None: it isn't installed here."""
    spec = importlib.util.find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec is not None and spec.submodule_search_locations else None


def problems(root: Path, needs: Iterable[Need], package: str) -> list[str]:
    """What the `package` that lies in `root` lacks of `needs`, one line a symbol; empty: it fits."""
    found = []
    trees: dict[str, ast.Module | None] = {}
    for need in needs:
        if need.module not in trees:
            trees[need.module] = _parse(root.joinpath(*need.module.split(".")))
        tree, name = trees[need.module], f"{package}.{need.module}.{need.symbol}"
        if tree is None:
            found.append(f"{name}: there is no module {package}.{need.module}")
            continue
        node = _find(tree, need.symbol)
        if node is None:
            found.append(f"{name}: there is no such name")
        elif need.parameters and (taken := _parameters(node))[: len(need.parameters)] != need.parameters:
            found.append(f"{name}: it takes ({', '.join(taken)}), not ({', '.join(need.parameters)})")
    return found


def _parse(module: Path) -> ast.Module | None:
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text())
    return None


def _find(tree: ast.Module, symbol: str) -> ast.stmt | None:
    body, node = tree.body, None
    for part in symbol.split("."):
        owner = node
        node = next((statement for statement in _flat(body) if part in _names(statement)), None)
        if node is None and isinstance(owner, ast.ClassDef):
            node = next(
                (statement for statement in ast.walk(owner) if isinstance(statement, ast.stmt) and part in _set_on_self(statement)), None
            )
        if node is None:
            return None
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body, and of its `if` and `try` branches."""
    flat = []
    for statement in body:
        flat.append(statement)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try)):
                flat += _flat(getattr(statement, field, []))
    return flat


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _set_on_self(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AnnAssign) else []
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _parameters(node: ast.stmt) -> tuple[str, ...]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    return tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
