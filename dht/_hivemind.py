"""The only importer of hivemind. torch is never imported here.

`import hivemind` (and `hivemind.dht`, `hivemind.utils`) runs package files that load torch, scipy and more (4 s,
277 MB) although the DHT needs none of it. Where hivemind was not imported by someone else, those three packages are
replaced by stand-ins that hold only the path, so that their submodules load one by one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import types
from pathlib import Path

from dht import _guards
from dht.clock import swarm_clock
from dht.errors import InputError

_UTILS = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": ("get_dht_time", "DHTExpiration", "ValueWithExpiration", "TimedStorage"),
}


@functools.cache
def package_folder() -> Path:
    """Where the hivemind wheel is installed; does not import it."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("hivemind is not installed; run: pip install hivemind==1.1.12")
    return Path(next(iter(spec.submodule_search_locations)))


def p2pd_binary() -> Path:
    """The libp2p daemon inside the hivemind wheel."""
    path = package_folder() / "hivemind_cli" / "p2pd"
    if not path.is_file():
        raise InputError(f"{path} is missing; run: pip install --force-reinstall hivemind==1.1.12")
    return path


def _stand_in(name: str, folder: Path) -> types.ModuleType:
    module = types.ModuleType(name, "Stand-in of fusion-p2p: submodules load one by one, without torch.")
    module.__path__ = [str(folder)]
    sys.modules[name] = module
    return module


@functools.cache
def _prepare() -> None:
    if "hivemind" in sys.modules:
        return
    folder = package_folder()
    root = _stand_in("hivemind", folder)
    for part in ("dht", "utils"):
        setattr(root, part, _stand_in(f"hivemind.{part}", folder / part))


@functools.cache
def pb() -> types.SimpleNamespace:
    """The protobuf messages of p2pd's control protocol (20 ms, 16 MB; no other part of hivemind)."""
    _prepare()
    module = importlib.import_module("hivemind.proto.p2pd_pb2")
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    return types.SimpleNamespace(
        Request=module.Request, Response=module.Response, StreamInfo=module.StreamInfo, DecodeError=decode_error
    )


@functools.cache
def node_parts() -> types.SimpleNamespace:
    """hivemind's DHT, with `dht._guards` in force and its clock replaced by swarm time (0.2 s, no torch)."""
    _prepare()
    utils = sys.modules["hivemind.utils"]
    if not hasattr(utils, "get_logger"):  # the stand-in: what hivemind.dht takes from the package
        for module, names in _UTILS.items():
            source = importlib.import_module(f"hivemind.utils.{module}")
            for name in names:
                setattr(utils, name, getattr(source, name))
    importlib.import_module("hivemind.utils.logging").use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process
    p2p = importlib.import_module("hivemind.p2p")
    node = importlib.import_module("hivemind.dht.node")
    protocol = importlib.import_module("hivemind.dht.protocol")
    storage = importlib.import_module("hivemind.dht.storage")
    timed_storage = importlib.import_module("hivemind.utils.timed_storage")
    parts = types.SimpleNamespace(
        P2P=p2p.P2P,
        PeerID=p2p.PeerID,
        P2PDaemonError=p2p.P2PDaemonError,
        Multiaddr=importlib.import_module("hivemind.utils.multiaddr").Multiaddr,
        DHTNode=node.DHTNode,
        DHTID=importlib.import_module("hivemind.dht.routing").DHTID,
        DHTProtocol=protocol.DHTProtocol,
        DictionaryDHTValue=storage.DictionaryDHTValue,
        DHTLocalStorage=storage.DHTLocalStorage,
        TimedStorage=timed_storage.TimedStorage,
        HeapEntry=timed_storage.HeapEntry,
        ValueWithExpiration=timed_storage.ValueWithExpiration,
        RecordValidatorBase=importlib.import_module("hivemind.dht.validation").RecordValidatorBase,
        dht_pb2=importlib.import_module("hivemind.proto.dht_pb2"),
    )
    for name, loaded in list(sys.modules.items()):
        if name.startswith("hivemind") and hasattr(loaded, "get_dht_time"):
            setattr(loaded, "get_dht_time", swarm_clock.now)  # noqa: B010
    setattr(node, "DHTProtocol", _guards.install(parts))  # noqa: B010
    return parts
