"""`fusion-peer join` from a TOML file: any option, by its long name without the dashes. The command line wins.

memory = "6GiB"
upload-mbps = 20
hours = "22:00-07:00"
runs = ["3f9a0c11"]
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

from dht.home import home
from fusion_p2p.errors import InputError
from peer.plain import reason

_NEVER = ("help", "home", "config", "ready_fd")


def apply_settings(
    top: argparse.ArgumentParser, options: argparse.Namespace, argv: Sequence[str] | None
) -> argparse.Namespace:
    """`options` parsed again with the file's values as defaults; InputError names the file and the line's key."""
    path: Path = options.config or home() / "peer.toml"
    if options.config is None and not path.exists():
        return options
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}; --config takes a TOML file of options") from error
    join = _subparser(top, "join")
    known = {a.dest: a for a in join._actions if a.dest not in _NEVER}
    defaults: dict[str, object] = {}
    for key, value in found.items():
        action = known.get(key.replace("-", "_"))
        if action is None:
            raise InputError(f"{path}: {key} is no setting; known are {', '.join(sorted(known)).replace('_', '-')}")
        defaults[action.dest] = _converted(path, key, value, action)
    join.set_defaults(**defaults)
    return top.parse_args(argv)


def _converted(path: Path, key: str, value: object, action: argparse.Action) -> object:
    if action.nargs == 0:
        if isinstance(value, bool):
            return value
        raise InputError(f"{path}: {key} is true or false, not {value!r}")
    many = action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction)
    given = value if isinstance(value, list) else [value]
    if (len(given) != 1 and not many) or not all(isinstance(v, str | int | float) for v in given):
        raise InputError(f"{path}: {key} = {value!r} cannot be used; it takes {'a list' if many else 'one value'}")
    convert = action.type if callable(action.type) else str
    try:
        made = [convert(str(v)) for v in given]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise InputError(f"{path}: {key}: {error}") from error
    return made if many else made[0]


def _subparser(top: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: argparse.ArgumentParser = action.choices[name]
            return found
    raise InputError(f"no command {name}")
