"""Train any PyTorch model on a network of volunteers. Names resolve on first use, so that importing costs nothing."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_p2p.capture import capture
    from fusion_p2p.optim import SGD, AdamW, Constant, Cosine, Linear
    from fusion_p2p.pipeline import LocalPipeline
    from fusion_p2p.split import split

    Run: Any
    LocalSwarm: Any

_WHERE = {
    "capture": "fusion_p2p.capture",
    "split": "fusion_p2p.split",
    "LocalPipeline": "fusion_p2p.pipeline",
    "Run": "peer.api",
    "LocalSwarm": "peer.api",
    "AdamW": "fusion_p2p.optim",
    "SGD": "fusion_p2p.optim",
    "Cosine": "fusion_p2p.optim",
    "Linear": "fusion_p2p.optim",
    "Constant": "fusion_p2p.optim",
}

__all__ = ["SGD", "AdamW", "Constant", "Cosine", "Linear", "LocalPipeline", "LocalSwarm", "Run", "capture", "split"]


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'fusion_p2p' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(types.ModuleType):
    """Importing the submodule `capture` or `split` must not put it in front of the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
