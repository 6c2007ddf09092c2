"""Random changes of seed inputs: of bytes, of JSON documents, and of tar headers with valid checksums."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

INTEGERS = [0, 1, 2, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 0.5, 1e308, -1e308, float("inf"), float("nan"), 2**31, 2**63, 2**64, 10**30, "", "a",
    "0", "\x00", "../../etc/passwd", "/dev/zero", "1e999", [], {}, [[]], [None], {"": None}, [0] * 100, "a" * 1000,
    {"id": 1}, [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], {"size": [8, 8], "counts": "0"}, {"size": [8, 8], "counts": [1, 63]},
]  # fmt: skip
WORDS = [
    b"&a ", b"*a", b"!!python/object/apply:os.system ", b"!!binary ", b"!!set ", b"!!timestamp ", b"<<: ", b"? ", b": ",
    b"- ", b"[", b"]", b"{", b"}", b"'", b'"', b"\n", b"\n  ", b"|", b">", b"%", b"@", b"2001-99-99", b"1:2:3",
    b"0x", b"0b1", b".inf", b".nan", b"1e999", b"~", b"null", b"\xff", b"\x00", b"#", b"[" * 500, b"{a: " * 500,
]  # fmt: skip


def mutate(seed: bytes, rng: random.Random, seeds: Sequence[bytes] = (), words: Sequence[bytes] = ()) -> bytes:
    """1 to 4 random changes of `seed`; parts of `seeds` and `words` may be inserted."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        kind = rng.randrange(9)
        start = rng.randrange(len(data) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 16, 64))
        if kind == 0 and data:
            data[start % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[start % len(data)] = rng.randrange(256)
        elif kind == 2:  # an integer of 1, 2, 4 or 8 bytes
            width = rng.choice((1, 2, 4, 8))
            value = (rng.choice(INTEGERS) % (1 << (8 * width))).to_bytes(width, rng.choice(("little", "big")))
            data[start : start + width] = value
        elif kind == 3:
            del data[start : start + size]
        elif kind == 4:
            data[start:start] = rng.randbytes(size)
        elif kind == 5:
            data[start:start] = data[start : start + size]
        elif kind == 6:
            del data[start:]
        elif kind == 7 and seeds:
            other = rng.choice(seeds)
            first = rng.randrange(len(other) + 1)
            data[start : start + size] = other[first : first + size]
        elif kind == 8 and words:
            data[start:start] = rng.choice(words)
        else:
            data[start : start + size] = rng.randbytes(min(size, len(data) - start))
    return bytes(data)


def mutate_json(seed: bytes, rng: random.Random) -> bytes:
    """1 to 3 nodes of a JSON document replaced, deleted or copied."""
    document = {"": copy.deepcopy(json.loads(seed))}
    for _ in range(rng.choice((1, 1, 2, 3))):
        nodes = list(_nodes(document))
        container, key = rng.choice(nodes)
        kind = rng.randrange(5)
        if kind == 0 and container is not document:
            del container[key]
        elif kind == 1:
            other, other_key = rng.choice(nodes)
            container[key] = copy.deepcopy(other[other_key])
        elif kind == 2 and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif kind == 3 and isinstance(container[key], str):
            container[key] = mutate(container[key].encode(), rng).decode("latin-1")
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(document[""]).encode()


def _nodes(container: Any) -> Any:
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        yield container, key
        if isinstance(container[key], (dict, list)):
            yield from _nodes(container[key])


def mutate_tar(seed: bytes, rng: random.Random) -> bytes:
    """Changes of a tar file whose header checksums are then made valid again."""
    data = bytearray(mutate(seed, rng)) if rng.random() < 0.3 else bytearray(seed)
    for _ in range(rng.choice((1, 1, 2))):
        block = 512 * rng.randrange(max(1, len(data) // 512))
        field, width = rng.choice(((0, 100), (124, 12), (124, 12), (156, 1), (157, 100), (257, 6), (345, 155)))
        if rng.random() < 0.5:
            value = rng.choice((b"0" * 11, b"7" * 11, b"\x80" + b"\xff" * 11, b"-1", b"", b"x", b"L", b"g", b"S", b"1"))
        else:
            value = mutate(bytes(data[block + field : block + field + width]), rng)
        data[block + field : block + field + width] = value[:width].ljust(width, b"\0")[: max(0, len(data) - block)]
    for block in range(0, len(data) - 511, 512):
        header = data[block : block + 512]
        if header[257:262] == b"ustar" or rng.random() < 0.05:
            header[148:156] = b" " * 8
            data[block + 148 : block + 156] = b"%06o\0 " % sum(header)
    return bytes(data)
