"""What a program does can only lower its score: no program turns a 0 into an error, which would mask the sample."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.config.schema.reward import SandboxFusionConfig
from strop.rewards.rules.code import compute_score
from strop.rewards.sandbox import launch
from strop.rewards.sandbox.launch import isolation_problem, run_tests
from strop.rewards.sandbox.limits import SandboxError, SandboxLimits
from strop.rewards.sandbox.work_folder import empty_folder, exceeds_disk

HERE = [level for level in ("namespaces", "landlock", "limits") if not isolation_problem(level)]
SCRIPTS = {
    "deep folders": "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\nopen('x', 'w').close()",
    "folders without rights": "import os\nos.makedirs('a/b/c'); open('a/b/f', 'w').close()\n"
    "for path in ('a/b/c', 'a/b', 'a'):\n    try: os.chmod(path, 0)\n    except OSError: pass",
    "folders that cannot be listed": "import os\nos.mkdir('a', 0o300); os.mkdir('a/b', 0o300); os.mkdir('c', 0)",
    "no rights to the own folder": "import os\nos.mkdir('a')\ntry: os.chmod('.', 0)\nexcept OSError: pass",
    "the own folder is gone": "import os\ntry: os.rmdir(os.getcwd())\nexcept OSError: pass",
    "the own folder has another name": "import os\nhere = os.getcwd()\ntry: os.rename(here, here + 'x')\nexcept OSError: pass\n"
    "try: os.rmdir(here + 'x')\nexcept OSError: pass",
    "loops of links": "import os\nos.symlink('a', 'b'); os.symlink('b', 'a'); os.symlink('.', 'c'); os.symlink('/', 'd')\n"
    "os.mkdir('e'); os.symlink('../e', 'e/f')",
    "names that are no text": "import os\nopen(b'\\xff\\xfe', 'w').close(); os.mkdir(b'\\xff'); open('a\\nb', 'w').close()",
    "names of the clean-up": "import os\nfor n in range(20): os.makedirs(f'.removed-{n}/.removed-{n}/a')",
    "pipes and sockets": "import os, socket\nos.mkfifo('p')\ntry: socket.socket(socket.AF_UNIX).bind('s')\nexcept OSError: pass",
    "many files": "try:\n    for n in range(6000): open(str(n), 'w').close()\nexcept OSError: pass",
    "a full disk": "try:\n    for n in range(100): open(str(n), 'wb').write(bytes(1 << 20))\nexcept OSError: pass",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "much output": "while True: print('x' * 10**6)",
    "output that is no text": "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 10 + b'\\xed\\xa0\\x80')",
    "errors that are no text": "import sys\nsys.stderr.buffer.write(b'\\xff\\x00' * 1000)\nprint('\\udc80')",
    "closed descriptors": "import os\nos.closerange(0, 4096)",
    "a giant integer": "print('1' * 100_000)",
    "not a number": "print('nan')",
    "infinity": "print('inf')",
    "an exception that cannot be shown": "class E(BaseException):\n    def __str__(self): raise self\nraise E",
    "a traceback that fails": "import sys, traceback\ntraceback.print_exception = None\nsys.stderr = None\n1 / 0",
    "an interpreter without modules": "import sys, builtins\nsys.modules.clear()\nbuiltins.__import__ = None\n1 / 0",
    "a giant exit code": "import sys\nsys.exit(10**100)",
    "an exit code that is an object": "import sys\nclass C(int):\n    def __and__(self, other): return 'x'\nsys.exit(C(3))",
    "an abort": "import os\nos.abort()",
    "endless recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "own limits": "import resource\nfor k in (0, 1, 3, 6, 7):\n    resource.setrlimit(k, (0, 0))",
    "exit functions": "import atexit\natexit.register(lambda: 1 / 0)\nimport threading\nthreading._shutdown = None",
}


def settings(level: str) -> SandboxFusionConfig:
    return SandboxFusionConfig(timeout=1.0, total_timeout=20.0, isolation=level, memory_limit_mb=256)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_hostile_script_has_score_0(name):
    """The second test runs after what the first one left."""
    level = HERE[0]
    truth = {"inputs": ["1", "1"], "outputs": ["3", "3"]}
    result = compute_score(f"```python\n{SCRIPTS[name]}\n```", truth, sandbox=settings(level))
    assert result["score"] == 0.0


FILES = [
    name for name in SCRIPTS if any(part in name for part in ("folder", "links", "names", "pipes", "files"))
]


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """A folder that other users can enter, in memory if possible: disks may take long to remove many files."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="strop-test-", dir=base))
    folder.chmod(0o755)
    yield folder
    empty_folder(str(folder))
    folder.rmdir()


@pytest.mark.parametrize("level", HERE[1:])
@pytest.mark.parametrize("name", [*FILES, "closed descriptors"])
def test_hostile_files_at_other_levels(name, level, fast_folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(fast_folder))
    outcomes = run_tests(
        SCRIPTS[name], [{"stdin": ""}] * 2, SandboxLimits(seconds=1.0, memory_mb=256), level=level
    )
    assert len(outcomes) == 2
    left = [path.name for path in fast_folder.iterdir()]
    assert left == [] or name == "the own folder has another name"


VALUES = {
    "an integer beyond floats": "return 10**400",
    "an integer beyond text": "return 10**5000",
    "a negative integer": "return -10**400",
    "infinity": "return float('inf')",
    "not a number": "return float('nan')",
    "an object equal to all": "class E:\n        def __eq__(self, other): return True\n    return E()",
    "a list that contains itself": "a = []\n    a.append(a)\n    return a",
    "a deep list": "a = []\n    for _ in range(100_000): a = [a]\n    return a",
    "an endless generator": "import itertools\n    return itertools.count()",
    "an array that lies": "class A:\n        def tolist(self): return self\n    return A()",
    "a dict with odd keys": "return {None: 1, True: 2, 1.5: 3}",
    "text that is no text": "return '\\udc80'",
    "bytes": "return b'x'",
    "an exit": "raise SystemExit(0)",
    "an exit at once": "import os\n    os._exit(0)",
    "an exit of the import": "pass\nimport os\nos._exit(0)",
    "garbage in the pipe": "import os\n    for d in range(3, 64):\n        try: os.write(d, b'{\"value\": ')\n        except OSError: pass",
    "a list in the pipe": "import os\n    for d in range(3, 64):\n        try: os.write(d, b'[1]')\n        except OSError: pass\n    os._exit(0)",
    "bytes in the pipe": "import os\n    for d in range(3, 64):\n        try: os.write(d, b'\\xff\\xfe')\n        except OSError: pass\n    os._exit(0)",
    "a deep value in the pipe": "import os\n    for d in range(3, 64):\n"
    "        try: os.write(d, b'{\"value\": ' + b'[' * 50000)\n        except OSError: pass\n    os._exit(0)",
    "many digits in the pipe": "import os\n    for d in range(3, 64):\n"
    "        try: os.write(d, b'{\"value\": ' + b'9' * 5000 + b'}')\n        except OSError: pass\n    os._exit(0)",
}
EXPECTED = [0.5, 3, 10**300, [1], "x", {"a": 1.5}, True]


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_value_has_score_0(name):
    expected = EXPECTED
    if name in ("an endless generator", "a deep list"):  # these take their time
        expected = EXPECTED[:1]
    truth = {"fn_name": "f", "inputs": [[] for _ in expected], "outputs": expected}
    result = compute_score(f"```python\ndef f():\n    {VALUES[name]}\n```", truth, sandbox=settings(HERE[0]))
    assert result["score"] == 0.0


@pytest.mark.parametrize(
    "name", ["an exit", "an exit at once", "an exit of the import", "an integer beyond text"]
)
def test_no_value_is_not_none(name):
    truth = {"fn_name": "f", "inputs": [[]], "outputs": [None]}
    program = f"```python\ndef f():\n    {VALUES[name]}\n```"
    assert compute_score(program, json_text(truth), sandbox=settings(HERE[0]))["score"] == 0.0
    assert (
        compute_score("```python\ndef f(): pass\n```", json_text(truth), sandbox=settings(HERE[0]))["score"]
        == 1.0
    )


def json_text(truth: dict[str, object]) -> str:
    return json.dumps({**truth, "outputs": [[None]]})


# --- the folder of a program ----------------------------------------------------------------------------------------------------


def test_an_empty_folder_after_anything(fast_folder):
    tmp_path = fast_folder
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        Path("file").touch()
    finally:
        os.fchdir(here)
        os.close(here)
    os.symlink("/", tmp_path / "root")
    (tmp_path / ".removed-0").mkdir()
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "closed" / "inner").chmod(0)
    (tmp_path / "closed").chmod(0)
    assert empty_folder(str(tmp_path)) and not list(tmp_path.iterdir())
    assert Path("/usr").exists()


def test_the_use_of_disk(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(1 << 20))
    assert not exceeds_disk(str(tmp_path), 2 << 20, 10)
    assert exceeds_disk(str(tmp_path), 1 << 19, 10)
    assert exceeds_disk(str(tmp_path), 2 << 20, 2)
    assert exceeds_disk(str(tmp_path / "gone"), 2 << 20, 2)


@pytest.mark.parametrize("level", [level for level in HERE if level in ("landlock", "limits")])
def test_the_disk_limit_counts_all_files_and_deleted_ones(level):
    limits = SandboxLimits(seconds=60.0, total_seconds=200.0, disk_mb=4)
    many = "import time\nfor n in range(8): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(300)"
    deleted = (
        "import os, time\nheld = []\nfor n in range(8):\n    held.append(open(str(n), 'wb'))\n"
        "    held[-1].write(bytes(1 << 20)); held[-1].flush(); os.unlink(str(n))\ntime.sleep(300)"
    )
    assert [run_tests(p, [{"stdin": ""}], limits, level=level)[0].status for p in (many, deleted)] == [
        "disk"
    ] * 2


def test_killing_the_supervisor_is_a_failure_where_it_is_possible():
    """Without isolation a program can do it. With it, a supervisor that was killed says nothing about a program."""
    kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint(3)"
    outcomes = run_tests(kill, [{"stdin": ""}] * 2, SandboxLimits(seconds=60.0), level="limits")
    assert [outcome.status for outcome in outcomes] == ["error", "error"]


def test_a_killed_supervisor_at_other_levels_is_an_error(monkeypatch):
    monkeypatch.setattr(launch, "_COMMAND", ["/bin/sh", "-c", "kill -9 $$"])
    with pytest.raises(SandboxError, match="exit code -9"):
        run_tests("print(3)", [{"stdin": ""}], level="landlock")
    assert run_tests("print(3)", [{"stdin": ""}], level="limits")[0].status == "error"


def test_there_is_no_group_inside_bubblewrap():
    """Its files cannot be opened there."""
    with launch._memory_group("bubblewrap", SandboxLimits()) as group:
        assert group is None


def test_a_weak_level_is_named_in_a_warning(caplog):
    launch._warn_of_weak_level.cache_clear()
    assert launch.choose_isolation("limits").level == launch.choose_isolation("limits").level == "limits"
    assert caplog.text.count("weak isolation") == 1 and "network is OPEN" in caplog.text


@pytest.mark.parametrize(
    "name", ["an exception that cannot be shown", "a traceback that fails", "an interpreter without modules"]
)
def test_an_exception_is_a_failure_also_if_it_cannot_be_shown(name):
    [outcome] = run_tests(f"print(3, flush=True)\n{SCRIPTS[name]}", [{"stdin": ""}], level=HERE[0])
    assert outcome.status == "error" and outcome.stdout == "3\n"
