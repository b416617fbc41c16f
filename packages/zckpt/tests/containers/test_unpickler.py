import contextlib
import os
import pickle
import random
import resource
import struct
import subprocess
import time
from collections import OrderedDict
from pathlib import Path

import pytest

from zckpt import CheckpointCorrupt
from zckpt.containers import unpickler
from zckpt.containers.torch_file import find_global
from zckpt.containers.unpickler import Constructor, DataUnpickler, Record


def read(program: bytes) -> object:
    return DataUnpickler(find_global, lambda told: told).run(program)


PLAIN = {
    "numbers": [0, 1, -1, 255, 256, 65536, -(2**31), 2**63, 2**200, 1.5, float("inf"), True, False, None],
    "text": ["", "a", "é" * 300, b"", b"\x00\xff" * 200],
    "buffers": [bytearray(b"xy")],
    "nested": ({"a": [1, (2, (3,), ())]}, {1: "one", (1, "b"): 2, None: 3}),
    "sets": [{1, 2}, frozenset({3})],
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_data_is_what_pickle_makes_of_it(protocol: int) -> None:
    value = {key: each for key, each in PLAIN.items() if {"sets": 4, "buffers": 5}.get(key, 0) <= protocol}
    assert read(pickle.dumps(value, protocol)) == value


def test_shared_objects_stay_shared() -> None:
    inner: list[int] = []
    outer = read(pickle.dumps([inner, inner]))
    assert isinstance(outer, list)
    assert outer[0] is outer[1]


class Runs:
    """`__reduce__` returns a call that an ordinary unpickler executes."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self.call[0], self.call[1:]


def exploits(marker: Path) -> dict[str, bytes]:
    """Pickles that create `marker` when unpickled, each by another way in."""
    command = f"touch {marker}"
    short = bytes([len(command)]) + command.encode()
    text = str(marker).encode()
    dumps = {f"system_{p}": pickle.dumps(Runs(os.system, command), p) for p in range(6)}
    return {
        **dumps,
        "eval": pickle.dumps(Runs(eval, f"open({str(marker)!r}, 'w').close()")),
        "popen": pickle.dumps({"weights": [Runs(subprocess.Popen, ["touch", str(marker)])]}),
        "getattr": b"cbuiltins\ngetattr\n(cos\npath\nS'x'\ntR.",
        "instance": b"(S'touch " + text + b"'\nios\nsystem\n.",
        "object": b"(cos\nsystem\nS'touch " + text + b"'\no.",
        "stack_global": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x8c" + short + b"\x85R.",
        "hidden": b"\x80\x02]q\x00(cposix\nsystem\nq\x01U" + short + b"\x85q\x02Re.",
        "torch": b"ctorch.serialization\nload\n(S'" + text + b"'\ntR.",
        "nested_name": b"\x80\x04\x8c\x05torch\x8c\x0eos.system.call\x93)R.",
        "extension": b"\x80\x02\x82\x01.",
        "build": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}(U\x04makeU\x01xub.",
        "new_keywords": b"\x80\x04cdeepspeed.x\nY\n)}\x8c\x01a\x8c\x01bs\x92.",
        "call_of_a_value": b"\x80\x02K\x01)R.",
        "call_of_a_record": b"\x80\x02cdeepspeed.x\nY\n)R)R.",
    }  # fmt: skip


NAMES = list(exploits(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_an_exploit_runs(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(CheckpointCorrupt, match=r"not allowed|calls a|sets attributes|keyword arguments|is invalid"):
        read(exploits(marker)[name])
    assert not marker.exists()


@pytest.mark.parametrize("name", ["system_0", "system_2", "system_4", "eval", "instance", "stack_global", "hidden"])
def test_the_exploits_are_real(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    pickle.loads(exploits(marker)[name])
    assert marker.exists()


def test_the_error_names_the_global_and_the_place() -> None:
    with pytest.raises(
        CheckpointCorrupt, match=r"names 'posix.system', which is not allowed.*None of its code was run.*byte"
    ):
        read(pickle.dumps(Runs(os.system, "true"), 2))


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (b"", "is invalid"),
        (b"\x80\x02}", "is invalid|has no end"),
        (b"\x80\x02.", "is invalid"),
        (b"\x80\x02K\x01K\x02.", "is invalid"),
        (b"\x80\x02h\x05.", "KeyError"),
        (b"\x80\x02(.", "a mark in place of a value"),
        (b"\x80\x02K\x01e.", "is invalid"),
        (b"\x80\x02K\x01(K\x02K\x03u.", "expected a dict"),
        (b"\x80\x02}(K\x01u.", "a key without a value"),
        (b"\x80\x02}(]K\x01u.", "a list as a key"),
        (b"\x80\x02\x8a\xff", "is invalid"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f", "is invalid"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62), "is invalid"),
        (b"\x80\x04\x96" + struct.pack("<Q", 1 << 62), "is invalid"),
        (b"\xff\xff", "is invalid"),
    ],
)  # fmt: skip
def test_broken_programs_are_named_errors(program: bytes, problem: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=problem):
        read(program)


def test_depth_and_sharing_cost_nothing() -> None:
    """A list in a list, a hundred thousand deep; and one whose copy would have 2**60 members."""
    deep = read(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    assert isinstance(deep, list)
    doubled = b"".join(b"0h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    assert isinstance(read(b"\x80\x02K\x01q\x00" + doubled + b"."), tuple)
    with pytest.raises(CheckpointCorrupt, match="as a key"):  # hashing it would take 2**60 steps
        read(b"\x80\x02K\x01q\x00" + doubled + b"q\xff0}h\xffK\x01s.")
    while deep:  # unwind, so that freeing it is shallow too
        deep = deep[0]


DOUBLED = b"\x80\x04K\x01q\x00" + b"".join(b"0h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
LARGE = b"\x80\x04X" + struct.pack("<L", 10_000) + b"a" * 10_000 + b"q\x000"
LATIN = b"X\x06\0\0\0latin1q\x010"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (DOUBLED + b"0ctorch\ndevice\nh\x3c\x85R.", "a container in place of a string or int"),
        (DOUBLED + b"0cpathlib\nPosixPath\nh\x3c\x85R.", "a container in place of a string or int"),
        (DOUBLED + b"\x8c\x01a\x93.", "as a name"),
        (LARGE + LATIN + b"](" + b"c_codecs\nencode\nh\x00h\x01\x86R" * 100 + b"e.", "large values repeatedly"),
        (LARGE + b"}h\x00Ns.", "a str as a key"),
        (b"\x80\x04}\x8b" + struct.pack("<L", 1000) + b"\x01" * 1000 + b"Ns.", "a int as a key"),
    ],
)
def test_what_would_grow_beyond_its_program_is_refused(program: bytes, problem: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=problem):
        read(program)


def test_printing_a_record_does_not_follow_what_it_shares() -> None:
    made = Record("deepspeed.x")
    for _ in range(60):
        made = Record("deepspeed.x", (made, made), {"a": made, "b": made})
    assert repr(made) == "Record(kind='deepspeed.x')"


def test_the_machine_knows_what_its_finder_gives_it() -> None:
    def only(name: str) -> object:
        if name != "a.b C":
            raise CheckpointCorrupt(f"not {name}")
        return Constructor(name, lambda *args: Record(name, args))

    made = DataUnpickler(only, lambda told: told).run(b"\x80\x02ca.b\nC\nK\x05\x85R}U\x01xK\x01sb.")
    assert isinstance(made, Record)
    assert (made.kind, made.args, made.get("x"), made.get("y", 9)) == ("a.b C", (5,), 1, 9)


def test_a_program_that_was_changed_is_a_named_error_or_data() -> None:
    """3000 programs with bytes flipped, dropped and repeated; nothing but CheckpointCorrupt ever comes out."""
    rng = random.Random(11)
    programs = [pickle.dumps({k: v for k, v in PLAIN.items() if k != "text"}, p) for p in (2, 4)]
    refused = 0
    for _ in range(3000):
        program = bytearray(rng.choice(programs))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(program))
            change = rng.randrange(3)
            if change == 0:
                program[at] ^= 1 << rng.randrange(8)
            elif change == 1:
                del program[at : at + rng.randint(1, 4)]
            else:
                program[at:at] = program[at : at + rng.randint(1, 8)]
        try:
            read(bytes(program))
        except CheckpointCorrupt:
            refused += 1
    assert refused > 500


HOSTILE = {  # a few bytes of program for many bytes of objects
    "sets": b"\x80\x04" + b"\x8f" * (1 << 20) + b".",
    "lists": b"]" * (1 << 20) + b".",
    "dicts in a list": b"](" + b"}" * (1 << 20) + b"e.",
    "pairs of a memoized tuple": b")\x94" + b"h\x00h\x00\x86" * (1 << 19) + b".",
    "memo entries": b"N" + b"\x94" * (1 << 20) + b".",
    "numbers that are dropped": b"K\x010" * (1 << 20) + b".",
    "nested lists": b"]" * (1 << 20) + b"a" * ((1 << 20) - 1) + b".",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_memory_is_bounded_by_the_objects_that_a_program_makes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "sets":  # those have the real limits; smaller ones save minutes
        monkeypatch.setattr(unpickler, "MAX_OBJECT_NBYTES", 1 << 26)
        monkeypatch.setattr(unpickler, "MAX_INSTRUCTIONS", 1 << 20)
    program = HOSTILE[kind] if kind != "sets" else b"\x8f" * (1 << 22) + b"."
    before, began_s = resident_nbytes(), time.monotonic()
    with pytest.raises(CheckpointCorrupt, match=r"makes objects of more than \d+ MiB, or has more than [\d,]+ instr"):
        read(program)
    assert resident_nbytes() - before < 900 << 20
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize(
    "program",
    [
        b"\x8d" + (10**18).to_bytes(8, "little") + b"text.",  # BINUNICODE8 that claims 10^18 bytes
        b"\x8b\xff\xff\xff\x7f1.",  # LONG4 of 2 GiB
        b"\x96" + (2**63 - 1).to_bytes(8, "little") + b".",  # BYTEARRAY8
        b"I" + b"9" * 10_000 + b"\n.",
        b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.x",  # a frame longer than the program
    ],
)
def test_claimed_sizes_cost_nothing(program: bytes) -> None:
    before = resident_nbytes()
    with contextlib.suppress(CheckpointCorrupt):  # the frame is only a hint, and is ignored
        assert read(program) is None
    assert resident_nbytes() - before < 64 << 20


def test_a_large_honest_program_is_read() -> None:
    names = {f"layers.{index}.weight": (index, [1, 2, 3], {"dtype": "float32"}) for index in range(50_000)}
    assert read(pickle.dumps(names)) == names


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
