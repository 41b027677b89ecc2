"""The command line: serve, status, doctor, replay, check-config."""

from __future__ import annotations

import argparse
import sys

import kvservice
from kvservice.cli import doctor, replay, status
from kvservice.daemon.config import ConfigError, Settings, describe, load
from kvservice.daemon.serve import ExitCode, serve

_FLAGS = {
    "socket_path": "server.socket_path",
    "grpc_listen": "server.grpc_listen",
    "tcp_listen": "server.tcp_listen",
    "capacity_bytes": "arena.capacity_bytes",
    "segment_bytes": "arena.segment_bytes",
    "log_level": "server.log_level",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ConfigError as error:
        sys.stderr.write(f"kvservice: {error}\n")
        return ExitCode.BAD_CONFIGURATION
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvservice", description="KV-cache transfer and tiering service.")
    parser.add_argument("--version", action="version", version=kvservice.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    server = commands.add_parser("serve", help="run the daemon; with no options it is complete")
    _add_settings(server)
    server.set_defaults(run=lambda options: serve(_settings(options)))
    checker = commands.add_parser("check-config", help="check the configuration, and describe its keys")
    checker.add_argument("file", nargs="?", help="TOML file to check")
    checker.set_defaults(run=_check_config)
    status.add_command(commands)
    replay.add_command(commands)
    doctor.add_command(commands)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file (flags and environment win)")
    for flag, key in _FLAGS.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", metavar="VALUE", help=f"sets {key}")


def _settings(options: argparse.Namespace) -> Settings:
    flags = {key: value for flag, key in _FLAGS.items() if (value := getattr(options, flag)) is not None}
    return load(options.config, flags=flags)


def _check_config(options: argparse.Namespace) -> int:
    load(options.file)
    for entry in describe():
        sys.stdout.write(f"{entry.key} = {entry.default}  ({entry.type}, {entry.allowed})\n")
        sys.stdout.write(f"    {entry.meaning}\n")
    sys.stdout.write(f"{options.file or 'the environment'}: no error\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
