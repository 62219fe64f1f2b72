"""hivemind's record-validator interface over `dht.records`: what is stored here and what is believed when read."""

from __future__ import annotations

import collections
import hashlib
import logging
import math
import struct
from typing import Any

import msgspec

from dht import records
from dht.clock import SwarmClock
from dht.errors import RecordError

log = logging.getLogger("dht.validator")

_REMEMBERED = 8192
_bytes_decoder = msgspec.msgpack.Decoder(bytes)


class RecordRules:
    """`check` says whether a record, as hivemind passes it around, may be stored or believed now."""

    def __init__(self, clock: SwarmClock) -> None:
        self.clock = clock
        self.refused: collections.Counter[str] = collections.Counter()
        self._good: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._named: set[tuple[int, bytes]] = set()

    def check(self, key: bytes, packed_subkey: bytes, packed_value: bytes, expiration: float) -> bool:
        if not isinstance(expiration, float) or not math.isfinite(expiration):
            self.refused["record"] += 1
            return False
        head = struct.pack(">Id", len(packed_subkey), expiration)
        seen = hashlib.blake2b(head + key + packed_subkey + packed_value, digest_size=16).digest()
        if seen in self._good:  # every replica returns the same records: a signature is verified once
            return self.clock.now() <= expiration
        try:
            self._check(key, packed_subkey, packed_value, expiration)
        except records.VersionSkew as error:
            if len(self._named) < 256 and (error.major, error.subkey[:38]) not in self._named:
                self._named.add((error.major, error.subkey[:38]))
                log.warning("%s; one of the two should be updated", error)
            self.refused["version"] += 1
            return False
        except RecordError as error:
            log.debug("refused: %s", error)
            self.refused["record"] += 1
            return False
        self._good[seen] = None
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)
        return True

    def _check(self, key: bytes, packed_subkey: bytes, packed_value: bytes, expiration: float) -> None:
        if len(packed_value) > records.MAX_RECORD_BYTES + 8 or len(packed_subkey) > 128:
            raise RecordError(f"a record of {len(packed_value)} bytes; at most {records.MAX_RECORD_BYTES} are accepted")
        try:
            subkey, value = _bytes_decoder.decode(packed_subkey), _bytes_decoder.decode(packed_value)
        except msgspec.DecodeError as error:
            raise RecordError(f"subkey or value is not a byte string: {error}") from error
        records.unseal(key, subkey, value, expiration, now=self.clock.now())


def make_validator(base: Any, clock: SwarmClock) -> Any:
    """An instance of hivemind's RecordValidatorBase (`base`, passed in so that this module needs no hivemind)."""

    class Validator(base):  # type: ignore[misc]
        rules = RecordRules(clock)

        def validate(self, record: Any) -> bool:
            return self.rules.check(record.key, record.subkey, record.value, record.expiration_time)

    return Validator()
