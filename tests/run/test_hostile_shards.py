"""Files of torch.save that are damaged or hostile: they are read right or refused, and nothing in them runs."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.run.merge.archive import find_tensor_name, read_archive
from strop.run.merge.merge import folder_tensors
from strop.run.merge.plain_pickle import read_pickle
from strop.run.merge.sources import read_source
from strop.run.merge.verl import read_shards
from tests.run.test_merge import shards

FILE = "model_world_size_1_rank_0.pt"
FOLDER = "model_world_size_1_rank_0"
WEIGHTS = {"a.weight": torch.arange(12.0).reshape(4, 3), "b.bias": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a verl checkpoint with one rank."""
    folder = tmp_path_factory.mktemp("verl")
    shards(folder, WEIGHTS, ranks=1)
    return (folder / FILE).read_bytes()


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def archive(content: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip with right checksums."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as opened:
        for name, data in content.items():
            opened.writestr(name, data)
    return target.getvalue()


def read(folder: Path, data: bytes) -> dict[str, Tensor]:
    (folder / FILE).write_bytes(data)
    return read_shards(folder)


def equal(found: dict[str, Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_plain_file_is_read(saved: bytes, tmp_path: Path) -> None:
    assert equal(read(tmp_path, saved))


def test_plain_tensors_of_every_dtype(tmp_path: Path) -> None:
    content = {"shared": torch.arange(6.0)}
    content["view"] = content["shared"].view(2, 3).t()
    for dtype in (torch.float64, torch.float16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn):
        content[str(dtype)] = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    content["parameter"] = torch.nn.Parameter(torch.rand(2, 2))
    content["empty"] = torch.empty(0, 4)
    content["scalar"] = torch.tensor(3.5)
    torch.save(content, tmp_path / "weights.pt")
    found = read_archive(tmp_path / "weights.pt", find_tensor_name)
    assert isinstance(found, dict) and list(found) == list(content)
    for name, tensor in content.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.detach().float()), name


# --- refused at once ----------------------------------------------------------------------------------------


class Writes(torch.nn.Module):
    """A TorchScript module whose __setstate__ writes a file when it is loaded."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.numbers = torch.zeros(1)

    @torch.jit.export
    def __getstate__(self) -> tuple[str, Tensor, bool]:
        return (self.path, self.numbers, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, Tensor, bool]) -> None:
        self.path = state[0]
        self.training = state[2]
        self.numbers = torch.from_file(self.path, True, 8).fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_torchscript_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "written"
    torch.jit.save(torch.jit.script(Writes(str(target))), str(tmp_path / FILE))
    assert not target.exists()
    with pytest.raises(ValueError, match=r"rank_0\.pt cannot be read: it is a TorchScript archive"):
        read_shards(tmp_path)
    assert not target.exists()
    torch.jit.load(str(tmp_path / FILE))
    assert target.exists(), "the archive of this test writes when it is loaded"


@pytest.mark.parametrize("name", ["constants.pkl", "code/__torch__.py"])
def test_parts_of_a_program_in_a_plain_archive(saved: bytes, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="TorchScript archive"):
        read(tmp_path, archive({**records(saved), f"{FOLDER}/{name}": b""}))


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../evil", f"{FOLDER}/../evil", f"{FOLDER}/data/../evil", "../data/0", "other/data/9"],
)
def test_foreign_names_in_the_archive(saved: bytes, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be read: it h"):
        read(tmp_path, archive({**records(saved), name: b"x"}))


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch hacked",)


def old_format(**options: object) -> bytes:
    target = io.BytesIO()
    torch.save({"weight": Malicious()}, target, **options)  # type: ignore[arg-type]
    return target.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        old_format(_use_new_zipfile_serialization=False),
        pickle.dumps({"weight": Malicious()}),
        b"storages".ljust(100, b"\0") + b"0" * 1000,
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
    ids=["legacy", "pickle", "tar", "empty", "lfs"],
)
def test_other_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not in the zip format that torch\.save writes"):
        read(tmp_path, data)
    assert not (tmp_path / "hacked").exists()


def test_a_compressed_archive_is_refused(saved: bytes, tmp_path: Path) -> None:
    """A record of a few bytes could fill the memory."""
    with pytest.raises(ValueError, match="is compressed"):
        read(tmp_path, archive(records(saved), zipfile.ZIP_DEFLATED))


def pickled(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pickled(b"cos\nsystem\n", b"X\x04\x00\x00\x00true", b"\x85R"), "names os.system"),
        (pickled(b"cbuiltins\neval\n", b"X\x01\x00\x00\x001", b"\x85R"), "names builtins.eval"),
        (pickled(b"ctorch\n_dynamo\n"), "names torch._dynamo"),
        (pickled(b"ctorch._utils\n_rebuild_tensor_v2\n", b")R"), "tensor without a storage"),
        (pickled(b"(ios\nsystem\n"), "uses INST"),
        (pickled(b"\x82\x01"), "uses EXT1"),
        (pickled(b"\x96" + struct.pack("<Q", 1 << 40)), "bytes"),
        (pickled(b"\x8e" + struct.pack("<Q", 1 << 62)), "bytes"),
        (pickled(b"N", b"r\xff\xff\xff\xff"), "holds a NoneType"),
        (pickled(b"}", b")" * 1, b"\x85" * 20_000, b"Ns"), "has a tuple as the key"),
        (pickled(b"]", b"Ns"), "object that it has not made|keys and values of a"),
        (pickled(b"]", b"\x85" * 20_000), "holds a tuple"),
        (pickled(b"h\x07"), "has not made"),
        (pickled(b"u"), "has not begun"),
        (pickled(b"NN"), "unfinished"),
        (pickled(b"NR"), "has not made"),
        (pickled(b"NNR"), "calls with a NoneType"),
        (pickled(b"N)R"), "calls a NoneType"),
        (pickled(b"N)\x81"), "instance of a NoneType"),
        (pickled(b"X\x01\x00\x00\x00aQ"), "not a storage"),
        (b"\x80\x02}", "before"),
    ],
    ids=range(21),
)
def test_pickles_of_saved_weights_hold_plain_data(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(tmp_path, archive({f"{FOLDER}/data.pkl": data, f"{FOLDER}/version": b"3\n"}))


@pytest.mark.parametrize(
    ("elements", "layout", "words"),
    [
        (4, (0, (2, 3), (3, 1)), "6 numbers in a storage of 4"),
        (4, (3, (2,), (1,)), "2 numbers in a storage of 4"),
        (4, (0, (2, 2), (1000, 1)), "4 numbers in a storage of 4"),
        (4, (0, (10**6, 10**6), (0, 0)), "numbers in a storage of 4"),
        (4, (-1, (2,), (1,)), "wrong place"),
        (4, (0, (-2,), (1,)), "not a tuple of numbers"),
        (4, (0, (2,), (-1,)), "not a tuple of numbers"),
        (4, (0, (2,), (1, 1)), "wrong place"),
        (4, (0, (1,) * 65, (1,) * 65), "not a tuple of numbers"),
        (10**30, (0, (2,), (1,)), "bytes"),
        (-4, (0, (2,), (1,)), "bytes"),
    ],
    ids=range(11),
)
def test_tensors_stay_inside_their_storage(
    tmp_path: Path, elements: int, layout: tuple[object, ...], words: str
) -> None:
    class Identity:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            if isinstance(value, Identity):
                return ("storage", torch.FloatStorage, "0", "cpu", elements)
            return None

    class Lies:
        def __reduce__(self) -> tuple[object, ...]:
            return torch._utils._rebuild_tensor_v2, (Identity(), *layout, False, {})

    data = io.BytesIO()
    Pickler(data, protocol=2).dump({"weight": Lies()})
    content = {f"{FOLDER}/data.pkl": data.getvalue(), f"{FOLDER}/data/0": b"\0" * 16}
    with pytest.raises(ValueError, match=words):
        read(tmp_path, archive(content))


@pytest.mark.parametrize(
    "said", ["[]", "{}", "nonsense", '{"world_size": "x"}', '{"world_size": -1}', "[" * 99_999]
)
def test_a_wrong_size_of_the_world(saved: bytes, tmp_path: Path, said: str) -> None:
    (tmp_path / "fsdp_config.json").write_text(said)
    with pytest.raises(ValueError, match=r"fsdp_config\.json"):
        read(tmp_path, saved)


def test_a_huge_world_is_refused_without_a_list_of_its_ranks(saved: bytes, tmp_path: Path) -> None:
    (tmp_path / "fsdp_config.json").write_text('{"world_size": 1000000000000000}')
    with pytest.raises(
        ValueError, match=r"of 1000000000000000 ranks, but model_world.*_rank_0\.pt is missing"
    ):
        read(tmp_path, saved)


@pytest.mark.parametrize("said", ["[]", '{"lora_alpha": "x"}', '{"lora_alpha": -1}', '{"lora_alpha": 1e999}'])
def test_a_wrong_scale_of_adapters(tmp_path: Path, said: str) -> None:
    torch.save({"model.q_proj.lora_A.default.weight": torch.ones(2, 4)}, tmp_path / FILE)
    for folder, name, text in (
        ("huggingface", "config.json", "{}"),
        ("lora_adapter", "adapter_config.json", said),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        read_source(str(tmp_path))


def test_a_folder_to_compare_with_runs_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Malicious()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read: it names posix\.system"):
        list(folder_tensors(tmp_path))
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert [name for name, _ in folder_tensors(tmp_path)] == ["weight"]
    assert not (tmp_path / "hacked").exists()


# --- mutations ----------------------------------------------------------------------------------------------


def flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4, 8])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def remove(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start + chance.randrange(1, 64) :]


def repeat(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start : start + chance.randrange(1, 64)] + data[start:]


MUTATIONS = (flip, flip, flip, cut, remove, repeat)


def other_opcode(data: bytes, chance: random.Random) -> bytes:
    """Another opcode in the place of one of the pickle."""
    places = [place for _, _, place in pickletools.genops(data)]
    place = chance.choice(places)
    code = chance.choice(pickletools.opcodes).code.encode("latin-1")
    return data[:place] + code + data[place + 1 :]


def test_damaged_archives_are_refused_or_read_right(saved: bytes, tmp_path: Path) -> None:
    """300 damaged files. A checksum that fits no longer is always found."""
    refused = 0
    for case in range(300):
        chance = random.Random(case)
        damaged = chance.choice(MUTATIONS)(saved, chance)
        try:
            assert equal(read(tmp_path, damaged)), f"case {case} was read wrong"
        except ValueError:
            refused += 1
    assert refused > 150
    assert [file.name for file in tmp_path.iterdir()] == [FILE], "nothing else was written"


def test_changed_pickles_with_right_checksums(
    saved: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 changed pickles: what is read is tensors by name."""
    monkeypatch.chdir(tmp_path)
    content = records(saved)
    refused = 0
    for case in range(400):
        chance = random.Random(case)
        mutation = chance.choice((*MUTATIONS, other_opcode, other_opcode))
        changed = mutation(content[f"{FOLDER}/data.pkl"], chance)
        try:
            found = read(tmp_path, archive({**content, f"{FOLDER}/data.pkl": changed}))
        except ValueError:
            refused += 1
            continue
        for name, tensor in found.items():
            assert type(name) is str and type(tensor) is Tensor, f"case {case}"
            assert tensor.numel() < 100, f"case {case}"
    assert refused > 200
    assert [file.name for file in tmp_path.iterdir()] == [FILE], "nothing else was written"


def test_the_interpreter_agrees_with_python_about_plain_data() -> None:
    def refuse(*_: object) -> object:
        raise ValueError("refused")

    shared = [1, 2]
    value = {"a": [1, 2.5, None, True, "text" * 100], "b": (shared, shared, (), {}), "n": 2**70, 3: -1}
    for protocol in (2, 3, 4, 5):
        found = read_pickle(pickle.dumps(value, protocol=protocol), refuse, refuse)
        assert found == value
        assert found["b"][0] is found["b"][1]  # type: ignore[index]
