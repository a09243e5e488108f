"""Bytes of entries and epochs: what goes in comes out, and nothing else is ever taken for it."""

import dataclasses
import hashlib
import zlib

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_dist.stores.codec import (
    MAX_ENTRY_BYTES,
    MAX_EPOCH_BYTES,
    Malformed,
    decode_entry,
    decode_epoch,
    encode_entry,
    encode_epoch,
)
from moe_dist.tuning.problem import Bucket, Cell, Entry, Epoch, Problem, Tactic, Timed, Winner, digest, pack

KEY = ("Key", (("environment", (("gpu", "NVIDIA H200"), ("triton", "3.9.0"))), ("bucket", (33, 64)), ("mode", "eager")))
ENTRY = Entry(
    key=pack(KEY),
    tactic=Tactic.of("triton", block_m=64, split=None, fused=True, scale=0.5),
    time=Timed(12.5, 0.25, 40),
    default=Tactic.of("torch_grouped"),
    default_time=Timed(20.0, 0.5, 40),
    provenance={"host": "node1", "pid": "17", "time": "2026-11-29T21:00:00Z", "release": "0.1.0"},
)
PROBLEMS = [Problem.of("moe_layer", experts=8, dtype="bf16"), Problem.of("router", experts=8)]
EPOCH = Epoch(
    7,
    "qwen3-ep2",
    {
        Cell(PROBLEMS[0], "eager", Bucket(1, 1)): Winner(ENTRY.tactic, 12.5, ENTRY.default, 20.0, "epoch"),
        Cell(PROBLEMS[0], "cuda_graph", Bucket(33, 64)): Winner(Tactic.of("all_reduce", collective=True), 3.0, ENTRY.default, 4.0, "epoch"),
        Cell(PROBLEMS[1], "eager", Bucket(1, 1)): Winner(ENTRY.tactic, 20.0, ENTRY.default, None, "epoch"),
    },
)
ENTRIES = {f"entries/e1/{key}": encode_entry(dataclasses.replace(ENTRY, key=pack(key))) for key in ("k1", "k2")}


def decode_any(data):
    decode_entry(data)


def decode_any_epoch(data):
    decode_epoch(data)


BOTH = pytest.mark.parametrize(
    ("data", "decode"), [(encode_entry(ENTRY), decode_any), (encode_epoch(EPOCH, ENTRIES), decode_any_epoch)], ids=["entry", "epoch"]
)


def seal(body):
    """What a writer of another shape, but with a right digest, would leave."""
    content = msgpack.packb(body)
    return msgpack.packb({**body, "digest": hashlib.sha256(content).digest()[:16]})


def entry_body(**changes):
    body = msgpack.unpackb(encode_entry(ENTRY))
    del body["digest"]
    return {**body, **changes}


def seal_epoch(body, **changes):
    """The same of an epoch, whose content is packed. changes: of what is around it."""
    return seal({"v": 2, "kind": "epoch", "packed": zlib.compress(msgpack.packb(body)), **changes})


def epoch_body(**changes):
    body = msgpack.unpackb(zlib.decompress(msgpack.unpackb(encode_epoch(EPOCH, ENTRIES))["packed"]))
    return {**body, **changes}


def winner_row(place=0, **changes):
    """The epoch's winners with one field of one of them changed."""
    names = ["problem", "mode", "low", "high", "tactic", "tactic_us", "default", "default_us"]
    rows = epoch_body()["winners"]
    rows[place] = list({**dict(zip(names, rows[place], strict=True)), **changes}.values())
    return rows


def test_an_entry_comes_back_equal():
    found = decode_entry(encode_entry(ENTRY), digest(KEY))
    assert found == ENTRY
    assert found.key_digest == digest(KEY)


scalars = (
    st.none() | st.booleans() | st.text(max_size=5) | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
tactics = st.builds(
    lambda backend, params, collective: Tactic.of(backend, collective=collective, **params),
    st.text(max_size=8),
    st.dictionaries(st.text(max_size=5).filter(lambda name: name not in ("backend", "collective")), scalars, max_size=4),
    st.booleans(),
)
microseconds = st.floats(0, allow_nan=False, allow_infinity=False)
times = st.builds(Timed, microseconds, microseconds, st.integers(1, 2**40))
entries = st.builds(
    Entry,
    st.binary(max_size=64),
    tactics,
    times,
    tactics,
    st.none() | times,
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4),
)


@given(entries)
def test_every_entry_comes_back_equal(entry):
    found = decode_entry(encode_entry(entry), entry.key_digest)
    assert found == entry
    assert encode_entry(found) == encode_entry(entry)


nested = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2))
problems = st.builds(
    lambda operation, fields: Problem.of(operation, **fields), st.text(max_size=5), st.dictionaries(st.text(max_size=3), nested, max_size=3)
)
buckets = st.tuples(st.integers(1, 2**40), st.integers(0, 2**40)).map(lambda row: Bucket(row[0], sum(row)))
winners = st.builds(Winner, tactics, microseconds, tactics, st.none() | microseconds, st.just("epoch"))
epochs = st.lists(problems, min_size=1, max_size=3).flatmap(
    lambda few: st.builds(
        Epoch,
        st.integers(0, 2**40),
        st.text(max_size=5),
        st.dictionaries(st.builds(Cell, st.sampled_from(few), st.sampled_from(["eager", "cuda_graph"]), buckets), winners, max_size=4),
    )
)
embedded_entries = st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=4)


@given(epochs, embedded_entries, st.randoms(use_true_random=False))
def test_every_epoch_comes_back_equal_and_equal_epochs_are_equal_bytes(epoch, embedded, random):
    data = encode_epoch(epoch, embedded)
    found, found_embedded = decode_epoch(data)
    assert (found, found_embedded) == (epoch, embedded)
    assert found.digest == epoch.digest
    winners, embedded = list(found.winners.items()), list(embedded.items())
    random.shuffle(winners)
    random.shuffle(embedded)
    assert encode_epoch(dataclasses.replace(found, winners=dict(winners)), dict(embedded)) == data


def test_an_epoch_comes_back_equal_with_its_entries():
    found, embedded = decode_epoch(encode_epoch(EPOCH, ENTRIES), deployment="qwen3-ep2", number=7)
    assert found == EPOCH
    assert found.digest == EPOCH.digest
    assert embedded == ENTRIES


def test_the_empty_epoch_comes_back():
    assert decode_epoch(encode_epoch(Epoch(), {})) == (Epoch(), {})


@BOTH
def test_truncated_at_any_byte(data, decode):
    for length in range(len(data)):
        with pytest.raises(Malformed):
            decode(data[:length])
    with pytest.raises(Malformed):
        decode(data + b"\0")


@BOTH
def test_any_bit_flipped(data, decode):
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(Malformed):
                decode(bytes(damaged))


@given(st.binary(max_size=64))
def test_any_bytes_at_all(data):
    for decode in (decode_any, decode_any_epoch):
        with pytest.raises(Malformed):
            decode(data)


plain = st.recursive(
    scalars | st.binary(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
)


@given(st.sampled_from(["key", "tactic", "time", "default", "default_time", "provenance"]), plain)
@example("provenance", {"0": "", "": ""})  # names that encoding sorts
@example("time", [-0.0, 0.0, 1])
@example("tactic", ["triton", [["b", 1], ["a", 1]], False])
@example("tactic", ["triton", [["a", 1], ["a", 1]], False])
def test_a_field_of_another_shape_under_a_right_digest(field, value):
    data = seal(entry_body(**{field: value}))
    try:
        found = decode_entry(data)
    except Malformed:
        return
    assert encode_entry(found) == data  # it was well formed after all, and says exactly what was written


indices = st.integers(-1, 3)
rows = st.tuples(
    indices,
    st.sampled_from(["eager", "cuda_graph"]) | plain,
    indices | plain,
    indices | plain,
    indices | plain,
    st.floats(0, 9) | plain,
    indices | plain,
    st.none() | st.floats(0, 9) | plain,
)
parts = {
    "number": plain,
    "deployment": plain,
    "problems": st.lists(st.sampled_from([problem.packed for problem in PROBLEMS]) | plain, max_size=3) | plain,
    "tactics": st.lists(tactics.map(Tactic.to_plain) | plain, max_size=3) | plain,
    "winners": st.lists(rows, max_size=3) | st.permutations(epoch_body()["winners"]) | plain,
    "entries": st.dictionaries(st.text(max_size=2), st.binary(max_size=2)) | plain,
}


@given(st.fixed_dictionaries({}, optional=parts))
@example({"entries": {"b": b"", "a": b""}})
@example({"problems": epoch_body()["problems"][::-1]})
@example({"winners": epoch_body()["winners"][::-1]})
@example({"winners": epoch_body()["winners"][:1]})  # problems and tactics that no winner uses
def test_parts_of_an_epoch_of_another_shape_under_a_right_digest(changes):
    data = seal_epoch(epoch_body(**changes))
    try:
        found = decode_epoch(data)
    except Malformed:
        return
    assert encode_epoch(*found) == data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": 0}, "format version 0; this release reads 1"),  # an older one
        ({"v": 2, "surprise": 1}, "format version 2; this release reads 1"),  # a newer one may have other fields
        ({"v": True}, "format version True"),
        ({"kind": "epoch"}, "kind 'epoch' where 'entry' was asked for"),
        ({"surprise": 1}, "fields .*surprise where"),
        ({"time": [float("nan"), 0.0, 1]}, "nan is no time"),
        ({"time": [float("inf"), 0.0, 1]}, "inf is no time"),
        ({"time": [-1.0, 0.0, 1]}, r"-1\.0 is no time"),
        ({"time": [1.0, 0.0, 0]}, "a time over 0 samples"),
        ({"time": [1, 0.0, 1]}, "1 is no time"),  # an int: not what we write
        ({"time": [-0.0, 0.0, 1]}, r"-0\.0 is no time"),  # equal to another time, and other bytes
        ({"tactic": ["triton", [["x", float("nan")]], False]}, "a parameter that is no number: "),
        ({"tactic": ["triton", [["b", 1], ["a", 1]], False]}, "parameters must be sorted, and each there once"),
        ({"tactic": ["triton", [["a", 1], ["a", 1]], False]}, "parameters must be sorted, and each there once"),
        ({"tactic": 3}, "int where tuple was expected"),
        ({"key": "text"}, "str where bytes was expected"),
        ({"provenance": {"pid": 3}}, "int where str was expected"),
        ({"provenance": {"b": "", "a": ""}}, "not the bytes that encoding its content gives"),
    ],
)
def test_wrong_content_under_a_right_digest(changes, message):
    with pytest.raises(Malformed, match=message):
        decode_entry(seal(entry_body(**changes)))


OTHER_BYTES = "not the bytes that encoding its content gives"
UNSORTED = "its problems or winners are not sorted, each there once"
UNUSUAL_TACTICS = "its tactics are not in order of use, each there once"
RELABELLED = msgpack.packb(["Problem", [["shapes", []], ["operation", "router"]]])


def with_tactics(order):
    """The epoch with its tactics in another order, or one of them twice; the winners use the same as before, by the last place of each."""
    body = epoch_body()
    place = {old: new for new, old in enumerate(order)}
    rows = [[*row[:4], place[row[4]], row[5], place[row[6]], row[7]] for row in body["winners"]]
    return {"tactics": [body["tactics"][old] for old in order], "winners": rows}


def twice_used(tactics):
    """The first tactic there twice, and both are used, in order."""
    rows = epoch_body()["winners"]
    rows[-1][4] = len(tactics)
    return {"tactics": [*tactics, tactics[0]], "winners": rows}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": epoch_body()["problems"] * 2}, "no winner uses a problem of its 4"),
        ({"problems": epoch_body()["problems"][:1] * 2}, UNSORTED),  # one twice, both used
        ({"problems": epoch_body()["problems"][::-1]}, UNSORTED),
        ({"problems": [*epoch_body()["problems"], Problem.of("unused").packed]}, "no winner uses a problem of its 3"),
        ({"problems": [RELABELLED, *epoch_body()["problems"][1:]]}, "not the bytes that packing its problem gives"),
        ({"problems": [msgpack.packb(["Problem", [["fields", [{}]], ["operation", "router"]]])]}, "not the bytes that packing"),
        ({"problems": [msgpack.packb(["Problem", [["fields", [b""]], ["operation", "router"]]])]}, "not the bytes that packing"),
        ({"problems": [msgpack.packb(["Problem", [["fields", []], {"operation": 0, "x": 0}]])]}, "not the bytes that packing"),
        ({"problems": [msgpack.packb(["Tactic", [["fields", []], ["operation", "router"]]])]}, "not a problem: 'Tactic'"),
        ({"problems": [msgpack.packb(["Problem", [["fields", 3], ["operation", "router"]]])]}, "not a problem"),
        ({"problems": [msgpack.packb(["Problem", [["fields", []], ["operation", 3]]])]}, "not a problem"),
        ({"problems": ["text"]}, "bytes-like"),
        ({"problems": dict.fromkeys(epoch_body()["problems"])}, "dict where tuple was expected"),
        ({"tactics": [*epoch_body()["tactics"], ["unused", [], False]]}, "no winner uses a tactic of its 4"),
        (with_tactics([1, 0, 2]), UNUSUAL_TACTICS),
        (twice_used(epoch_body()["tactics"]), UNUSUAL_TACTICS),
        ({"tactics": [["triton", ["ab"], False], *epoch_body()["tactics"][1:]]}, OTHER_BYTES),  # a pair that is one text
        ({"winners": epoch_body()["winners"] + epoch_body()["winners"][-1:]}, UNSORTED),
        ({"winners": epoch_body()["winners"][::-1]}, UNSORTED),
        ({"winners": winner_row(tactic_us=-0.0)}, r"-0\.0 is no time"),
        ({"winners": winner_row(default_us=-0.0)}, r"-0\.0 is no time"),
        ({"winners": winner_row(default_us=-1.0)}, r"-1\.0 is no time"),
        ({"winners": winner_row(tactic_us=float("inf"))}, "inf is no time"),
        ({"winners": winner_row(tactic_us=float("nan"))}, "nan is no time"),
        ({"winners": winner_row(tactic_us=None)}, "None is no time"),
        ({"winners": [[*row[:5], 1, row[6], None] for row in epoch_body()["winners"]]}, "1 is no time"),
        ({"winners": winner_row(problem=2)}, "place 2 of 2"),
        ({"winners": winner_row(default=-1)}, "place -1 of 3"),
        ({"winners": winner_row(tactic=False)}, "bool where int was expected"),
        ({"winners": winner_row(low=0)}, "0-1 is no bucket"),
        ({"winners": winner_row(low=2)}, "2-1 is no bucket"),
        ({"winners": winner_row(low=True)}, "bool where int was expected"),
        ({"winners": winner_row(mode=None)}, "NoneType where str was expected"),
        ({"winners": [row[:7] for row in epoch_body()["winners"]]}, "not enough values"),
        ({"winners": [epoch_body()["winners"][0][:7], *epoch_body()["winners"][1:]]}, "is longer than argument"),
        ({"winners": 3}, "int where tuple was expected"),
        ({"winners": {}}, "dict where tuple was expected"),
        ({"winners": []}, "no winner uses a problem of its 2"),
        ({"entries": dict(sorted(ENTRIES.items(), reverse=True))}, "its entries are not sorted"),
        ({"entries": {"a": "text"}}, "str where bytes was expected"),
        ({"entries": {b"a": b""}}, "bytes where str was expected"),
        ({"entries": []}, "tuple where dict was expected"),
        ({"number": True}, "bool where int was expected"),
        ({"deployment": b"qwen3-ep2"}, "bytes where str was expected"),
    ],
)
def test_wrong_parts_of_an_epoch_under_a_right_digest(changes, message):
    with pytest.raises(Malformed, match=f"not an epoch: .*{message}"):
        decode_epoch(seal_epoch(epoch_body(**changes)))


@pytest.mark.parametrize(
    "content",
    [
        msgpack.packb(epoch_body(), use_single_float=True),  # times in four bytes each, which hold them exactly
        msgpack.packb(epoch_body(number=300)).replace(b"\xcd\x01\x2c", b"\xd1\x01\x2c"),  # a number as one that has a sign: as long
    ],
)
def test_an_epoch_that_another_packer_wrote(content):
    assert content not in (msgpack.packb(epoch_body()), msgpack.packb(epoch_body(number=300)))
    with pytest.raises(Malformed, match=f"not an epoch: {OTHER_BYTES}"):
        decode_epoch(seal_epoch(epoch_body(), packed=zlib.compress(content)))


@pytest.mark.parametrize(
    ("longer", "usual"),
    [
        (b"\xde\x00\x02", b"\x82"),  # the map of two
        (b"\xdf\x00\x00\x00\x02", b"\x82"),
        (b"\xd9\x01k", b"\xa1k"),  # a key
        (b"\xda\x00\x01k", b"\xa1k"),
        (b"\xc5\x00\x01v", b"\xc4\x01v"),  # an entry
        (b"\xc6\x00\x00\x00\x01v", b"\xc4\x01v"),
        (b"\xa1k\xc4\x01v\xa1k\xc4\x01v", b"\xa1k\xc4\x01v\xa1l\xc4\x01w"),  # a key that is there twice
    ],
)
def test_an_epoch_whose_entries_another_packer_wrote(longer, usual):
    content = msgpack.packb(epoch_body(entries={"k": b"v", "l": b"w"}))
    other = content.replace(usual, longer)
    assert other != content
    assert msgpack.unpackb(other)["entries"].keys() <= {"k", "l"}
    with pytest.raises(Malformed, match=f"not an epoch: {OTHER_BYTES}"):
        decode_epoch(seal_epoch(epoch_body(), packed=zlib.compress(other)))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 0xFFFF, 0x10000])
def test_any_number_of_entries(count):
    entries = {f"{at:05d}": b"" for at in range(count)}
    assert decode_epoch(encode_epoch(EPOCH, entries))[1] == entries


@pytest.mark.parametrize("size", [0, 31, 32, 0xFF, 0x100, 0xFFFF, 0x10000])
def test_entries_and_keys_of_any_size(size):
    """Where msgpack writes a longer head, each; the key's characters are of two bytes as well."""
    for entries in ({"k": b"v" * size}, {"k" * size: b""}, {"k" * (size % 2) + "\xe9" * (size // 2): b""}):
        assert decode_epoch(encode_epoch(EPOCH, entries))[1] == entries


def test_a_time_of_minus_zero_is_written_as_zero():
    minus = Timed(-0.0, -0.0, 1)
    assert encode_entry(dataclasses.replace(ENTRY, time=minus)) == encode_entry(dataclasses.replace(ENTRY, time=Timed(0.0, 0.0, 1)))
    decode_entry(encode_entry(dataclasses.replace(ENTRY, time=minus, default_time=minus)))


def test_a_value_that_is_no_bytes():
    with pytest.raises(Malformed, match="NoneType bytes"):
        decode_entry(None)


def test_the_wrong_key():
    with pytest.raises(Malformed, match=f"key {digest(KEY)[:8]} lies where {digest('x')[:8]} was asked for"):
        decode_entry(encode_entry(ENTRY), digest("x"))


@pytest.mark.parametrize(
    ("sealed", "message"),
    [
        (seal({"v": 1, "kind": "epoch", **epoch_body()}), "format version 1; this release reads 2"),  # as it was before it was packed
        (seal_epoch(epoch_body(), packed="text"), "str where bytes was expected"),
        (seal_epoch(epoch_body(), packed=b"no stream"), "incorrect header check"),
        (seal_epoch(epoch_body(), packed=zlib.compress(msgpack.packb(epoch_body()))[:-1]), "not one stream of at most"),
        (seal_epoch(epoch_body(), packed=zlib.compress(msgpack.packb(epoch_body())) + b"?"), "not one stream of at most"),
        (seal_epoch(epoch_body(), packed=zlib.compress(bytes(MAX_EPOCH_BYTES + 1))), "not one stream of at most"),  # 64 KiB of 64 MiB
        (seal_epoch(epoch_body(), packed=zlib.compress(msgpack.packb([]))), "tuple where dict was expected"),
        (seal_epoch(epoch_body(surprise=1)), "fields .*surprise where number, deployment"),
    ],
)
def test_wrong_packing_of_an_epoch_under_a_right_digest(sealed, message):
    with pytest.raises(Malformed, match=message):
        decode_epoch(sealed)


def test_an_epoch_packs_what_its_entries_have_in_common():
    entries = {f"entries/e1/k{at}": encode_entry(dataclasses.replace(ENTRY, key=pack((*KEY, ("bucket", at))))) for at in range(100)}
    assert len(encode_epoch(EPOCH, entries)) < sum(map(len, entries.values())) / 4


def test_the_wrong_epoch():
    data = encode_epoch(EPOCH, ENTRIES)
    with pytest.raises(Malformed, match="'qwen3-ep2' lies where 'other' was asked for"):
        decode_epoch(data, deployment="other")
    with pytest.raises(Malformed, match="epoch 7 lies where 8 was asked for"):
        decode_epoch(data, number=8)
    with pytest.raises(Malformed, match="kind 'epoch' where 'entry'"):
        decode_entry(data)


def test_sizes_are_bounded():
    with pytest.raises(ValueError, match=f"the limit is {MAX_ENTRY_BYTES}"):
        encode_entry(dataclasses.replace(ENTRY, key=b"k" * MAX_ENTRY_BYTES))
    with pytest.raises(Malformed, match=f"the limit is {MAX_ENTRY_BYTES}"):
        decode_entry(b"\x90" * (MAX_ENTRY_BYTES + 1))


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 1000 + b"\x90",  # nested lists
        b"\x91" * 200_000,  # deeper than any stack
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xc7\x05\x01hello",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x81\x90\x01",  # a map whose key is a list
    ],
    ids=lambda data: data[:6].hex(),
)
def test_hostile_msgpack(data):
    for decode in (decode_any, decode_any_epoch):
        with pytest.raises(Malformed):
            decode(data)
