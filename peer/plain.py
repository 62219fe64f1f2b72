"""Text from strangers and from the system, made fit for a terminal, a log line and a table."""

from __future__ import annotations

MOST = 500


def reason(error: Exception) -> str:
    """What went wrong with a file that the line already names, without the number and the name again."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def one_line(text: str, most: int = MOST) -> str:
    """At most `most` characters of `text`; what does not print (terminal escapes, line ends, characters that change
    the direction of writing) becomes U+FFFD."""
    short = text if len(text) <= most else text[: most - 1] + "…"
    return short if short.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in short)


def lines(text: str) -> str:
    """The same for text of several lines, each of any length; tabs stay."""
    return "\n".join("\t".join(one_line(part, len(part) + 1) for part in line.split("\t")) for line in text.split("\n"))
