"""Guards against hivemind 1.1.12's defects, applied to its classes as they are loaded. Each has a test.

- An older store that is refused still shortens the newer record's life (`TimedStorage.store`).
- A dictionary grows without bound; above 4 MiB nobody can read it any more (`DHTLocalStorage.store_subkey`).
- One invalid entry hides a whole dictionary, and a dictionary's outer expiration is unsigned: infinity ends a search at
  the replica that says so (`call_find`). Invalid entries are dropped, the outer expiration is that of the inner ones.
- A node may call itself anything, hence sit next to any key. Ours is the hash of its peer id, others are not let in.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from dht.clock import swarm_clock
from dht.door import Door
from dht.identity import peer_id_text

MAX_DICTIONARY_BYTES = 2 << 20  # half of the largest message, so that a reply with neighbours still fits
MAX_FOR_OTHERS_BYTES = MAX_DICTIONARY_BYTES // 4  # beyond it a peer stores its own records only
MAX_DICTIONARIES = 4096
doors: dict[bytes, Door] = {}  # of this process's peers, by their 38-byte id; set before their node serves
_RPC = "/fusion/board/1"


def node_id_of(peer_id: bytes) -> int:
    """The only node id that the peer with this 38-byte id may have."""
    return int.from_bytes(hashlib.sha1(b"fusion-p2p/node\0" + peer_id, usedforsecurity=False).digest(), "big")


def install(hivemind: Any) -> type:
    """Repairs the storage classes in place; returns the protocol class that nodes are to use."""
    _repair_storage(hivemind)
    return _protocol_class(hivemind)


def _repair_storage(hivemind: Any) -> None:
    def store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
        if expiration_time < swarm_clock.now() and not self.frozen:
            return False
        known = self.data.get(key)
        if known is not None and not known.expiration_time < expiration_time:
            return False
        self.key_to_heap[key] = hivemind.HeapEntry(expiration_time, key)
        heapq.heappush(self.expiration_heap, self.key_to_heap[key])
        self.data[key] = hivemind.ValueWithExpiration(value, expiration_time)
        if known is None:
            self._remove_outdated()
        elif len(self.expiration_heap) > 2 * len(self.data) + 64:  # drop the entries of replaced values
            self.expiration_heap[:] = self.key_to_heap.values()
            heapq.heapify(self.expiration_heap)
        return True

    hivemind.TimedStorage.store = store
    unbounded = hivemind.DHTLocalStorage.store_subkey

    def store_subkey(self: Any, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        if known is None and len(self) >= MAX_DICTIONARIES:
            return False
        if known is not None and isinstance(known.value, hivemind.DictionaryDHTValue) and subkey not in known.value:
            size = sum(len(k) + len(v.value) + 16 for k, v in known.value.items())
            storer = _storer.get()
            most = MAX_DICTIONARY_BYTES if storer is None or subkey == storer else MAX_FOR_OTHERS_BYTES
            if size + len(subkey) + len(value) > most:
                return False
        return bool(unbounded(self, key, subkey, value, expiration_time))

    hivemind.DHTLocalStorage.store_subkey = store_subkey


_storer: ContextVar[bytes | None] = ContextVar("storer", default=None)  # whose call is being handled
_records_only: ContextVar[bool] = ContextVar("records_only", default=False)
_ONLY_RECORDS = b"records"


@contextlib.contextmanager
def records_only() -> Iterator[None]:
    """Calls made within say that they look for records, not for nodes: an answer without neighbours is half as long."""
    before = _records_only.set(True)
    try:
        yield
    finally:
        _records_only.reset(before)


class _Showing:
    """A stub whose calls carry the token of a swarm with a secret, and whether only records are wanted."""

    def __init__(self, stub: Any, token: bytes) -> None:
        self._stub, self._token = stub, token

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)

        async def call(request: Any, **options: Any) -> Any:
            if self._token:
                request.auth.signature = self._token
            if _records_only.get():
                request.auth.nonce = _ONLY_RECORDS
            return await method(request, **options)

        return call


class _Guarded:
    """A node's handlers behind its door: who is banned, or does not know the swarm's secret, gets an error."""

    def __init__(self, protocol: Any, door: Door) -> None:
        self._protocol, self._door = protocol, door

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._protocol, name)

        async def handle(request: Any, context: Any) -> Any:
            remote = peer_id_text(context.remote_id.to_bytes())
            if self._door.banned(remote) or not self._door.proves(remote, _RPC, request.auth.signature):
                raise PermissionError(f"peer {remote} is not let in here")
            before = _storer.set(context.remote_id.to_bytes())
            try:
                response = await method(request, context)
            finally:
                _storer.reset(before)
            if name == "rpc_find" and request.auth.nonce == _ONLY_RECORDS:
                for result in response.results:
                    del result.nearest_node_ids[:], result.nearest_peer_ids[:]
            return response

        return handle


def _protocol_class(hivemind: Any) -> type:
    base = hivemind.DHTProtocol
    dictionary_type = hivemind.DictionaryDHTValue

    def honest(node_id: Any, peer_id: Any) -> bool:
        return int(node_id) == node_id_of(peer_id.to_bytes())

    class FusionBoard1(base):  # type: ignore[misc,valid-type]
        """The class's name is the wire protocol's: a swarm of another version is another swarm."""

        def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
            """Drops what does not validate; true if something is left."""
            if self.record_validator is None or not isinstance(dictionary, dictionary_type):
                return False
            with dictionary.freeze():
                for subkey, (value, expiration) in list(dictionary.items()):
                    tag = self.serializer.dumps(subkey)
                    if not self._validate_record(key_bytes, tag, value, expiration):
                        del dictionary[subkey]
            return bool(dictionary)

        async def call_find(self, peer: Any, keys: Any) -> Any:
            found = await super().call_find(peer, keys)
            if found is None:
                return None
            out = {}
            for key, (item, nearest) in found.items():
                out[key] = self._rebuilt(item), {n: p for n, p in nearest.items() if honest(n, p)}
            return out

        @staticmethod
        def _rebuilt(item: Any) -> Any:
            if item is None or not isinstance(item.value, dictionary_type):
                return None
            fresh = dictionary_type()
            for subkey, (value, expiration) in item.value.items():
                fresh.store(subkey, value, expiration)
            return hivemind.ValueWithExpiration(fresh, fresh.latest_expiration_time) if fresh else None

        def get_stub(self, peer: Any) -> Any:
            stub, door = super().get_stub(peer), doors.get(self.p2p.peer_id.to_bytes())
            return stub if door is None else _Showing(stub, door.token(peer_id_text(peer.to_bytes()), _RPC))

        async def add_p2p_handlers(self, p2p: Any, wrapper: Any = None, **options: Any) -> None:
            door = doors.get(p2p.peer_id.to_bytes())
            await super().add_p2p_handlers(p2p, wrapper if door is None else _Guarded(self, door), **options)

        async def update_routing_table(self, node_id: Any, peer_id: Any, responded: bool = True) -> None:
            if node_id is None or honest(node_id, peer_id):
                await super().update_routing_table(node_id, peer_id, responded)

    return FusionBoard1
