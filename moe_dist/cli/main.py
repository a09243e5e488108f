"""The `moe-dist` command. Owns the list of subcommands and how an error becomes one line and an exit code.

A subcommand is a module with `HELP`, `add_arguments(parser)` and `run(arguments) -> exit code`. Exit codes: 0 done; 1 it was
tried and failed; 2 it was asked for wrongly, and nothing was started; 128 + n ended by signal n, which it also says of SIGPIPE where
nobody reads on what it prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_dist.cli import bench, doctor, store, tune
from moe_dist.errors import ConfigError, MoEDistError, StoreError, UnsupportedBackend
from moe_dist.settings import rank_settings

COMMANDS = {"tune": tune, "store": store, "doctor": doctor, "bench": bench}
WRONGLY_ASKED = (ConfigError, StoreError, UnsupportedBackend)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one rank speaks for all. A subcommand's own parser, which is another of these, says what is
    unknown, so that it is its help that is named. Flags are written out: what is short for one today may be short for two tomorrow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
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
    """Run one subcommand. What every rank was told wrongly, rank 0 says, in one line; all exit alike. Whoever stops reading (`| head`)
    ends it without a word."""
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # else it is the interpreter's end that finds nobody there, and says so
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in unread:
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str] | None) -> int:
    rank = 0
    try:
        rank = rank_settings().rank
        logging.basicConfig(level=logging.WARNING, format=f"moe-dist: rank {rank}: %(message)s")
        arguments = build_parser().parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    except MoEDistError as error:
        if rank == 0:
            print(f"moe-dist: {error}", file=sys.stderr)
        return 2 if isinstance(error, WRONGLY_ASKED) else 1


def _is_unread(stream: Any) -> bool:
    """Whether `stream` is a pipe whose other end is closed."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # none, or no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
