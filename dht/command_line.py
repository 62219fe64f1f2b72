"""What `fusion-peer` and `fusion-monitor` share: bad input is one line, numbers have bounds. Loads nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """Bad input is one line that says where help is, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def between(convert: Callable[[str], Number], low: float, high: float, unit: str = "") -> Callable[[str], Number]:
    """An option's type: a number from `low` to `high`, in `unit` (" s", say)."""

    def checked(text: str) -> Number:
        try:
            value = convert(text)
        except ValueError:
            kind = "a whole number" if convert is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {low:.10g} to {high:.10g}{unit}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} must lie between {low:.10g} and {high:.10g}{unit}")
        return value

    return checked
