"""What `moe-dist doctor` says of a serving engine: installed, patched, tuned, and how to tune. Imports no engine, changes nothing.

Owns the lines that are alike for all engines. A plugin brings a `Framework`, found through the entry point group `moe_dist.doctor`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator

from moe_dist.interop.source import Need, package_root, problems
from moe_dist.serving import TokenCounts, stored_epochs
from moe_dist.settings import plugins_to_load, serving_settings
from moe_dist.stores.open import shown_url

NAME = "moe_dist"  # the plugin's entry point and the engines' choice alike


_AT_START = {
    "tune": "what the store lacks is measured",
    "replay": "what the store has is taken, and nothing is measured",
    "off": "nothing is measured or taken, the defaults run",
}


@dataclasses.dataclass(frozen=True)
class Framework:
    """package: what is imported; deployments of its epochs begin with it. title: for people. distributions: that may bring the package.
    group, allow: entry point group, and the environment variable that lists the plugins to load; empty_allows: an empty one loads all.
    needs, tested: the names that the plugin relies on, and the releases that have them. patched, refused: what the plugin takes
    hold of, and what it leaves.
    """

    package: str
    title: str
    distributions: tuple[str, ...]
    group: str
    allow: str
    empty_allows: bool
    needs: tuple[Need, ...]
    tested: str
    patched: str
    refused: str

    def misfit(self, version: str | None = None) -> str | None:
        """Why the installed release can't have moe_dist, in one line; None: it can. version: as it calls itself; None: as it was installed.

        ModuleNotFoundError: it isn't installed.
        """
        root = package_root(self.package)
        if root is None:
            raise ModuleNotFoundError(f"{self.package} is not installed here", name=self.package)
        missing = problems(root, self.needs, self.package)
        if not missing:
            return None
        release = version or next(filter(None, map(_version, self.distributions)), "of unknown version")
        return (
            f"moe_dist {_version('moe-dist')} does not fit {self.title} {release}: {'; '.join(missing)}. Use {self.title} {self.tested}, "
            "or a moe_dist that knows this one"
        )

    def report(self, serve: str, store: str | None, model: str, tp: int, ep: int, max_tokens: int) -> Iterator[str]:
        """Lines for people. serve: the command that serves, without the store. store: its URL; None: as an engine would choose it."""
        yield from self._installed()
        settings = serving_settings({"store": store} if store else None)
        shown = shown_url(settings.store)
        named = shown if shown == settings.store else "URL"  # to be copied, and what is shown of a URL may not be all of it
        yield (
            f"settings: at start-up {_AT_START[settings.tune]} (tune={settings.tune}); store {shown}, budget {settings.budget.total_seconds():g} s, "
            f"strategy {settings.strategy}, policy {settings.policy}, unserved {settings.unserved}"
        )
        epochs = [epoch for epoch in stored_epochs(settings.store) if epoch.deployment.startswith(f"{self.package}:")]
        for epoch in epochs:
            modes = [cell.mode for cell in epoch.winners]
            cells = ", ".join(f"{modes.count(mode)} {mode}" for mode in sorted(set(modes)))
            yield f"tuned: {epoch.deployment}: epoch {epoch.number} ({epoch.digest[:8]}) with {cells} cells"
        if not epochs:
            yield f"tuned: {shown} holds no epoch of any {self.title} deployment"
        yield f"to tune where it is served: MOE_DIST_STORE={named} {serve}; a second start then measures nothing"
        buckets = ",".join(map(str, TokenCounts(max_tokens).ladder.bounds))
        yield (
            f"to tune ahead, where no experts of {self.title}'s own are in the pool (their version is part of the key): torchrun "
            f"--nproc-per-node={tp * ep} -m moe_dist.tune --model {model} --tp {tp} --ep {ep} --routed --buckets {buckets} --policy eager "
            f"--store {named}"
        )

    def _installed(self) -> Iterator[str]:
        root = package_root(self.package)
        if root is None:
            yield f"{self.package}: not installed here"
            return
        versions = [f"{name} {version}" for name in self.distributions if (version := _version(name)) is not None]
        yield f"{self.package}: {', '.join(versions) or 'of unknown version'} in {root}"
        found = [point for point in importlib.metadata.entry_points(group=self.group) if point.name == NAME]
        allowed = plugins_to_load(self.allow)
        unrestricted = allowed is None or (self.empty_allows and not allowed)
        if not found:
            yield (
                f"plugin: {self.title} does not find it: no entry point {NAME} in {self.group}; "
                f"install moe-dist in {self.title}'s own environment"
            )
        elif not unrestricted and NAME not in [name.strip() for name in (allowed or "").split(",")]:
            yield f"plugin: {self.allow}={allowed!r} keeps {self.title} from loading it; add {NAME}"
        else:
            yield f"plugin: {self.title} loads it in every process"
        if (misfit := self.misfit()) is not None:
            yield f"patched: nothing, since {misfit}"
            return
        yield f"patched: {self.patched}"
        yield f"refused: {self.refused}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
