"""The bytes of an entry and of an epoch: one small msgpack map each, sealed by a digest.

Owns the format and its version. Knows no key's meaning, no store and no environment. The tuner and the command line import
it; stores themselves move bytes that they don't look into.

    entry  v, kind "entry", key (packed canonical form), tactic, time, default, default_time, provenance, digest
    epoch  v, kind "epoch", packed, digest
           packed: the map number, deployment, problems (packed), tactics, winners, entries (store key: bytes), through zlib

A time is [median_us, spread_us, samples]; an epoch's winner is [problem, mode, low, high, tactic, tactic_us, default,
default_us], where problem, tactic and default are places in the lists before it, which are in order of first use. Maps and
winners are sorted, a time is never -0.0: equal content, equal bytes. `digest` is the first 16 bytes of SHA-256 over the map
without it. Bytes are taken only if they are exactly what encoding their content gives, so a flipped bit, a missing byte, a
trailing one or another writer's order is always found (what zlib makes of an epoch's content may differ by its release). Nothing is
unpickled or evaluated; sizes are bounded before anything is built. An epoch is packed because one entry is much like the next, and
thousands of ranks may read it from one server at once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from moe_dist.tuning.problem import Bucket, Cell, Entry, Epoch, Problem, Tactic, Timed, Winner

FORMAT_VERSION = 1
EPOCH_VERSION = 2
MAX_ENTRY_BYTES = 256 << 10  # a key with the recorded token counts of a thousand experts is 10 KiB
MAX_EPOCH_BYTES = 64 << 20  # before it is packed: 10,000 entries of a typical 2 KiB, three times over

_ENTRY_FIELDS = ["v", "kind", "key", "tactic", "time", "default", "default_time", "provenance"]
# What every map ends with: the field's name, and the head of 16 bytes, which follow.
_TAIL: bytes = msgpack.packb("digest") + b"\xc4\x10"
_PACKED_FIELDS = ["v", "kind", "packed"]
_OTHER_BYTES = "not the bytes that encoding its content gives"
_EPOCH_FIELDS = ["number", "deployment", "problems", "tactics", "winners", "entries"]


class Malformed(ValueError):
    """These bytes are no entry (epoch) of this format under this key: a miss, for the reason that the message gives."""


def encode_entry(entry: Entry) -> bytes:
    """ValueError: the entry is larger than any reader would take."""
    return _seal(_entry_content(entry), "entry", MAX_ENTRY_BYTES)


def decode_entry(data: bytes, key_digest: str | None = None) -> Entry:
    """The entry in `data`. key_digest: the digest of the key that was asked for; None: take an entry of any key.

    Malformed, and no other exception: why these bytes are not that entry.
    """
    body, content = _unseal(data, "entry", FORMAT_VERSION, _ENTRY_FIELDS, MAX_ENTRY_BYTES)
    try:
        entry = Entry(
            key=_typed(body["key"], bytes),
            tactic=_tactic(body["tactic"]),
            time=_time(body["time"]),
            default=_tactic(body["default"]),
            default_time=None if body["default_time"] is None else _time(body["default_time"]),
            provenance={_typed(name, str): _typed(value, str) for name, value in _typed(body["provenance"], dict).items()},
        )
        if _entry_content(entry) != content:
            raise ValueError(_OTHER_BYTES)
    except (TypeError, ValueError) as error:
        raise Malformed(f"not an entry: {error}") from error
    if key_digest is not None and entry.key_digest != key_digest:
        raise Malformed(f"the entry of key {entry.key_digest[:8]} lies where {key_digest[:8]} was asked for")
    return entry


def encode_epoch(epoch: Epoch, entries: Mapping[str, bytes]) -> bytes:
    """`entries`: store key -> encoded entry of what the winners came from, embedded so that a reader needs nothing else.

    ValueError: the epoch is larger than any reader would take.
    """
    content = _epoch_content(epoch, entries)
    if len(content) > MAX_EPOCH_BYTES:
        raise ValueError(f"epoch of {len(content)} bytes; the limit is {MAX_EPOCH_BYTES}")
    return _seal(_pack({"v": EPOCH_VERSION, "kind": "epoch", "packed": zlib.compress(content)}), "epoch", MAX_EPOCH_BYTES)


def decode_epoch(data: bytes, *, deployment: str | None = None, number: int | None = None) -> tuple[Epoch, dict[str, bytes]]:
    """The epoch in `data`, its winners of source "epoch", and its entries' bytes, not looked into. deployment, number: what was asked
    for; None: any.

    Malformed, and no other exception: why these bytes are not that epoch.
    """
    sealed, _ = _unseal(data, "epoch", EPOCH_VERSION, _PACKED_FIELDS, MAX_EPOCH_BYTES)
    try:
        content = _expand(_typed(sealed["packed"], bytes))
        body = _unpack(content)
        if list(_typed(body, dict)) != _EPOCH_FIELDS:
            raise ValueError(f"fields {', '.join(map(str, body))} where {', '.join(_EPOCH_FIELDS)} were expected")
        entries = _typed(body["entries"], dict)
        _all_typed(entries, str)
        _all_typed(entries.values(), bytes)
        if not _is_packed(body, content):
            raise ValueError(_OTHER_BYTES)
        winners = _winners(*(_typed(body[name], tuple) for name in ("problems", "tactics", "winners")))
        epoch = Epoch(_typed(body["number"], int), _typed(body["deployment"], str), winners)
        if list(entries) != sorted(entries):
            raise ValueError("its entries are not sorted")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a problem may nest as deep as msgpack reads
        raise Malformed(f"not an epoch: {error}") from error
    if deployment is not None and epoch.deployment != deployment:
        raise Malformed(f"the epoch of deployment {epoch.deployment!r} lies where {deployment!r} was asked for")
    if number is not None and epoch.number != number:
        raise Malformed(f"epoch {epoch.number} lies where {number} was asked for")
    return epoch, entries


def _entry_content(entry: Entry) -> bytes:
    return _pack(
        {
            "v": FORMAT_VERSION,
            "kind": "entry",
            "key": entry.key,
            "tactic": entry.tactic.to_plain(),
            "time": _plain_time(entry.time),
            "default": entry.default.to_plain(),
            "default_time": None if entry.default_time is None else _plain_time(entry.default_time),
            "provenance": dict(sorted(entry.provenance.items())),
        }
    )


def _epoch_content(epoch: Epoch, entries: Mapping[str, bytes]) -> bytes:
    problems: dict[bytes, int] = {}  # by their bytes: 1 and True are equal keys of a dict, and not the same problem or tactic
    tactics: dict[bytes, int] = {}
    winners = []
    # Many cells share few tactics: each is packed once.
    used = {id(tactic): tactic for winner in epoch.winners.values() for tactic in (winner.tactic, winner.default)}
    packed = {name: _pack(tactic.to_plain()) for name, tactic in used.items()}
    for cell in sorted(epoch.winners, key=lambda cell: (cell.problem.packed, cell.mode, cell.bucket.low, cell.bucket.high)):
        winner = epoch.winners[cell]
        problem = problems.setdefault(cell.problem.packed, len(problems))
        tactic = tactics.setdefault(packed[id(winner.tactic)], len(tactics))
        default = tactics.setdefault(packed[id(winner.default)], len(tactics))
        default_us = None if winner.default_us is None else _plain_us(winner.default_us)
        winners.append([problem, cell.mode, cell.bucket.low, cell.bucket.high, tactic, _plain_us(winner.tactic_us), default, default_us])
    return _pack(
        {
            "number": epoch.number,
            "deployment": epoch.deployment,
            "problems": list(problems),
            "tactics": [msgpack.unpackb(tactic) for tactic in tactics],
            "winners": winners,
            "entries": dict(sorted(entries.items())),
        }
    )


def _winners(problems: tuple[Any, ...], tactics: tuple[Any, ...], rows: tuple[Any, ...]) -> dict[Cell, Winner]:
    """The table of an epoch's body, which `_epoch_content` would write alike; checked a column at a time, since all ranks wait for it."""
    of, used = [Problem.from_packed(packed) for packed in problems], [_tactic(plain) for plain in tactics]
    packed = [_pack(tactic.to_plain()) for tactic in used]
    if packed != list(map(_pack, tactics)):
        raise ValueError(_OTHER_BYTES)
    at, modes, lows, highs, tactics_at, tactics_us, defaults_at, defaults_us = zip(*rows, strict=True) if rows else [()] * 8
    by_use = list(itertools.chain.from_iterable(zip(tactics_at, defaults_at, strict=True)))
    _require_places(at, len(problems), "problem")
    _require_places(by_use, len(tactics), "tactic")
    _all_typed(modes, str)
    buckets = list(map(_bucket, lows, highs))
    _require_times((*tactics_us, *(time_us for time_us in defaults_us if time_us is not None)))
    order = list(zip(at, modes, lows, highs, strict=True))
    if list(problems) != sorted(set(problems)) or not all(map(operator.lt, order, order[1:])):
        raise ValueError("its problems or winners are not sorted, each there once")
    if len(set(packed)) < len(packed) or list(dict.fromkeys(by_use)) != list(range(len(packed))):
        raise ValueError("its tactics are not in order of use, each there once")
    columns = zip(at, modes, buckets, tactics_at, tactics_us, defaults_at, defaults_us, strict=True)
    return {
        Cell(of[problem], mode, bucket): Winner(used[tactic], tactic_us, used[default], default_us, "epoch")
        for problem, mode, bucket, tactic, tactic_us, default, default_us in columns
    }


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _is_packed(body: Mapping[str, Any], content: bytes) -> bool:
    """Whether packing `body`, which was unpacked from `content`, gives `content`.

    The entries, nearly all of it, are not packed again: texts and bytes can be packed otherwise only with longer heads than they need.
    """
    before = _pack({**body, "entries": {}})[:-1]
    texts, values = [len(key.encode()) for key in body["entries"]], list(map(len, body["entries"].values()))
    heads = 1 + 2 * (len(texts) > 15) + 2 * (len(texts) > 0xFFFF)
    heads += sum(1 + (size > 31) + (size > 0xFF) + 2 * (size > 0xFFFF) for size in texts)
    heads += sum(2 + (size > 0xFF) + 2 * (size > 0xFFFF) for size in values)
    return content.startswith(before) and len(content) == len(before) + heads + sum(texts) + sum(values)


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, use_list=False, strict_map_key=True, max_ext_len=0)


def _expand(packed: bytes) -> bytes:
    """ValueError: not one whole stream, or of more than an epoch's bytes."""
    expander = zlib.decompressobj()
    try:
        content = expander.decompress(packed, MAX_EPOCH_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not expander.eof or expander.unused_data:
        raise ValueError(f"{len(packed)} packed bytes are not one stream of at most {MAX_EPOCH_BYTES}")
    return content


def _seal(content: bytes, kind: str, limit: int) -> bytes:
    # The same map with one field more: a map of up to 15 fields begins with the byte 0x80 + their number.
    data = b"%c%b%b%b" % (content[0] + 1, content[1:], _TAIL, _digest(content))
    if len(data) > limit:
        raise ValueError(f"{kind} of {len(data)} bytes; the limit is {limit}")
    return data


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:16]


def _unseal(data: bytes, kind: str, version: int, fields: list[str], limit: int) -> tuple[dict[str, Any], bytes]:
    """The map in `data` and its bytes without the digest, which is right."""
    if not isinstance(data, bytes) or len(data) > limit:
        raise Malformed(f"{len(data) if isinstance(data, bytes) else type(data).__name__} bytes; the limit is {limit}")
    try:
        body = _unpack(data)
        if type(body) is not dict or "v" not in body:
            raise Malformed("no map with a format version")
        if body.get("kind") != kind:
            raise Malformed(f"kind {body.get('kind')!r} where {kind!r} was asked for")
        if body["v"] != version or type(body["v"]) is not int:
            raise Malformed(f"format version {body['v']!r}; this release reads {version}")
        body.pop("digest", None)
        if list(body) != fields:
            raise Malformed(f"fields {', '.join(map(str, body))} where {', '.join(fields)} were expected")
        content = b"%c%b" % (data[0] - 1, data[1 : -len(_TAIL) - 16])
        if data[len(content) :] != _TAIL + _digest(content):
            raise Malformed("digest differs: the bytes were damaged")
    except Malformed:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # all that msgpack raises over bytes it can't read
        raise Malformed(f"not msgpack: {type(error).__name__} {error}") from error
    return body, content


def _typed(value: Any, wanted: type) -> Any:
    if type(value) is not wanted:
        raise TypeError(f"{type(value).__name__} where {wanted.__name__} was expected")
    return value


def _all_typed(values: Iterable[Any], wanted: type) -> None:
    for kind in set(map(type, values)) - {wanted}:
        raise TypeError(f"{kind.__name__} where {wanted.__name__} was expected")


def _tactic(plain: Any) -> Tactic:
    return Tactic.from_plain(_typed(plain, tuple))


def _plain_time(time: Timed) -> list[Any]:
    return [_plain_us(time.median_us), _plain_us(time.spread_us), int(time.samples)]


def _plain_us(time: float) -> float:
    return float(time) + 0.0  # which makes 0.0 of -0.0: equal times, equal bytes


def _time(plain: Any) -> Timed:
    median_us, spread_us, samples = _typed(plain, tuple)
    if _typed(samples, int) < 1:
        raise ValueError(f"a time over {samples} samples")
    return Timed(_microseconds(median_us), _microseconds(spread_us), samples)


def _require_times(values: tuple[Any, ...]) -> None:
    if set(map(type, values)) - {float} or not all(map(math.isfinite, values)) or min(values, default=1.0) <= 0:
        for value in values:  # one of them is no time, or is zero, which has a sign
            _microseconds(value)


def _microseconds(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value) or math.copysign(1.0, value) < 0:  # -0.0 is not written
        raise ValueError(f"{value!r} is no time")
    return value


@functools.lru_cache(maxsize=1024, typed=True)  # thousands of cells share a ladder; typed: True is not 1 here
def _bucket(low: Any, high: Any) -> Bucket:
    if not 1 <= _typed(low, int) <= _typed(high, int):
        raise ValueError(f"{low}-{high} is no bucket")
    return Bucket(low, high)


def _require_places(places: Sequence[Any], count: int, what: str) -> None:
    """ValueError or TypeError: they are not the places of `count` things, each of which is used."""
    _all_typed(places, int)
    for place in set(places).difference(range(count)):
        raise ValueError(f"place {place} of {count}")
    if len(set(places)) < count:
        raise ValueError(f"no winner uses a {what} of its {count}")
