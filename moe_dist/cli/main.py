"""The `moe-dist` command. Owns the list of subcommands and how an error becomes one line and an exit code.

Any rank says its error: one may be alone with it, and a launcher ends the others as soon as the first has ended.

A subcommand is a module with `HELP`, `add_arguments(parser)` and `run(arguments) -> exit code`. Exit codes: 0 done; 1 it was
tried and failed; 2 it was asked for wrongly, and nothing was started; 128 + n ended by signal n, which it also says of SIGPIPE where
nobody reads on what it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import functools
import hashlib
import logging
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from moe_dist.cli import bench, doctor, store, tune
from moe_dist.cli.checks import may_hold_login
from moe_dist.errors import ConfigError, MoEDistError, StoreError, UnsupportedBackend
from moe_dist.settings import RankSettings, rank_settings

COMMANDS = {"tune": tune, "store": store, "doctor": doctor, "bench": bench}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # what a write ends in that no reader has caused
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
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # else it is the interpreter's end that finds nobody there, and says so
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise
        _send_nowhere(unread)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _FULL or not _takes_nothing(sys.stdout, error):
            raise
        _send_nowhere([sys.stdout])
        print(f"moe-dist: what is printed can't be written: {error.strerror}", file=sys.stderr)
        return 1


def _send_nowhere(streams: Iterable[Any]) -> None:
    """What is left in them goes there, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


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
    """Which a launcher sends as soon as another rank has ended: this one is about to end anyway."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
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


def _takes_nothing(stream: Any, error: OSError) -> bool:
    """Whether it was `stream` that ended in `error`: then it does so again."""
    try:
        os.write(stream.fileno(), b"\n")
    except OSError as again:
        return again.errno == error.errno
    except (AttributeError, ValueError):  # none, or no file
        pass
    return False


def _is_unread(stream: Any) -> bool:
    """Whether `stream` is a pipe whose other end is closed."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # none, or no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
