"""The `moe-dist` command. Owns the list of subcommands and how an error becomes one line and an exit code.

Any rank says its error: one may be alone with it, and a launcher ends the others as soon as the first has ended.

A subcommand is a module with `HELP`, `add_arguments(parser)` and `run(arguments) -> exit code`. Exit codes: 0 done; 1 it was
tried and failed; 2 it was asked for wrongly, and nothing was started; 128 + n ended by signal n. What would be 0 is 128 + SIGPIPE where
nobody reads on what is printed on stdout, and 1 where that can't be written, as on a full disk; but not of a rank among several, for
which a launcher would end the others. What becomes of stderr changes no code (`output.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import functools
import hashlib
import itertools
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from moe_dist.cli import bench, doctor, store, tune
from moe_dist.cli.checks import may_hold_login
from moe_dist.cli.output import guarded, hurry
from moe_dist.errors import ConfigError, MoEDistError, StoreError, UnsupportedBackend
from moe_dist.settings import RankSettings, rank_settings

COMMANDS = {"tune": tune, "store": store, "doctor": doctor, "bench": bench}
WRONGLY_ASKED = (ConfigError, StoreError, UnsupportedBackend)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that it is said as every error is. A subcommand's own parser, which is another of these, says what is
    unknown, so that it is its help that is named; an unknown flag before anything that is missing, which it may have been meant for.
    Flags are written out: what is short for one today may be short for two tomorrow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._given: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = own = sys.argv[1:] if args is None else list(args)
        if not {"-h", "--help"} & set(own) and (wrong := self._unknown_flag(own)):
            close = difflib.get_close_matches(wrong, self._option_string_actions, n=1)
            self.error(f"unknown flag {wrong}{f'; did you mean {close[0]}?' if close else ''}")
        if not self._subparsers:
            for flag, value in [*itertools.pairwise(own), *(word.split("=", 1) for word in own if "=" in word)]:
                self._require_no_url(flag, value)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _unknown_flag(self, arguments: Iterable[str]) -> str | None:
        """The first flag that is not this parser's, before the name of a subcommand, which has a parser of its own."""
        known = self._option_string_actions
        subcommands = {name for action in self._actions if action.nargs == argparse.PARSER for name in action.choices or ()}
        for argument in arguments:
            flag = argument.partition("=")[0]
            if argument == "--" or argument in subcommands:
                return None
            if len(flag) > 1 and flag[0] == "-" and flag not in known and not re.match(r"-[\d.]|.* ", argument):  # no number, no text
                return flag
        return None

    def _require_no_url(self, flag: str, value: str) -> None:
        """Which would be said with the password that it may hold, by whoever finds no such file or model."""
        if flag in ("--model", "--json", "--deployment") and re.search("://|//.*@", value):
            self.error(f"argument {flag}: it is a URL, which can't be; a store's goes to --store")

    def error(self, message: str) -> NoReturn:
        for given in sorted(self._given, key=len, reverse=True):  # the URL of a store in a wrong place, with its password
            flag, _, value = given.partition("=") if given.startswith("-") else ("", "", given)
            for word in (flag, value):
                if may_hold_login(word):
                    message = message.replace(repr(word), "'...'").replace(word, "...")
        raise ConfigError(f"{message}; {self.prog} --help lists what there is")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="moe-dist", description="Tunes the mixture-of-experts layers of a served model, the same on every rank.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. An error is one line; of ranks on a host that would say the same the first rank's, and at most one other's. Whoever
    stops reading (`| head`) ends it without a word; where stdout takes nothing more, as on a full disk, it says so."""
    with guarded() as stdout:
        code = 0
        try:
            try:
                code = _run(argv)
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:  # amid that
            print(f"moe-dist: ended by {signal.SIGINT.name}", file=sys.stderr)
            code = 128 + signal.SIGINT
        except OSError as error:
            if stdout is None or error is not stdout.failed:
                raise
            if not code and isinstance(error, BrokenPipeError):
                code = 128 + signal.SIGPIPE
            elif not code:
                print(f"moe-dist: what is printed can't be written: {error.strerror}", file=sys.stderr)
                code = 1
        return code


def _run(argv: Sequence[str] | None) -> int:
    ranks = RankSettings()
    try:
        ranks = rank_settings()
        logging.basicConfig(level=logging.WARNING, format=f"moe-dist: rank {ranks.rank}: %(message)s")
        arguments = build_parser().parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    except MoEDistError as error:
        _say(str(error), ranks)
        return 2 if isinstance(error, WRONGLY_ASKED) else 1
    except KeyboardInterrupt:
        hurry()
        _say(f"ended by {signal.SIGINT.name}", ranks)
        return 128 + signal.SIGINT


def _say(text: str, ranks: RankSettings) -> None:
    """One line on stderr, with the rank where that isn't 0; nothing where another rank of this host has said the same.

    The first rank of a host speaks in any case: its output may be all that is shown, and whoever holds the name need not be one of us.
    """
    named = f"rank {ranks.rank}: "
    with _without_sigterm() if ranks.world_size > 1 else contextlib.nullcontext():
        if ranks.world_size == 1 or _is_first_to_say(text, ranks.meet_at) or ranks.local_rank == 0:
            print(f"moe-dist: {'' if ranks.rank == 0 or text.startswith(named) else named}{text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """Which a launcher sends as soon as another rank has ended: this one is about to end anyway, and then waits for no reader."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: hurry())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@functools.cache
def _is_first_to_say(text: str, meet_at: str) -> bool:
    """Whether no other living process on this host, of the ranks that meet at `meet_at`, has asked this. Holds until this one ends."""
    named = hashlib.sha256(f"{os.getuid()} {meet_at} {text}".encode()).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        try:
            holder.bind(f"\0moe-dist/{named}")  # no file: the system forgets it with the process
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        holder.detach()
    return True
