"""The sandbox of a user without privileges: what isolates programs there, and that nothing runs where nothing does."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.agents.python_tool import PythonTool
from strop.config.schema.reward import SandboxFusionConfig
from strop.rewards.rules.code import compute_score
from strop.rewards.sandbox import landlock, launch, seccomp
from strop.rewards.sandbox.launch import choose_isolation, isolation_problem, run_program, run_tests
from strop.rewards.sandbox.limits import SandboxLimits
from tests.rewards.test_code_assertions import READ_SELF
from tests.rewards.unprivileged import LANDLOCK, as_nobody

LIMITS = SandboxLimits(seconds=60.0, total_seconds=200.0, memory_mb=256, disk_mb=8, processes=8)
needs_seccomp = pytest.mark.skipif(bool(seccomp.problem()), reason="no seccomp filters here")


def landlock_problem() -> str:
    try:
        landlock.version()
    except OSError as error:
        return str(error)
    return seccomp.problem()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user can write to, with a file that every user can read and write."""
    folder = Path(tempfile.mkdtemp(prefix="strop-test-", dir="/tmp"))
    folder.chmod(0o777)
    (folder / "secret").write_text("hunter2")
    (folder / "secret").chmod(0o666)
    yield folder
    shutil.rmtree(folder)


ATTACK = """
import ctypes, os, signal, socket, sys
def attempt(name, action):
    try:
        result = action()
    except OSError:
        return
    except SystemExit:
        pass
    if result not in (-1, None):
        print(name, result)
libc = ctypes.CDLL(None, use_errno=True)
def write(path, mode):
    open(path, mode).close()
    return 'done'
attempt('read', lambda: open('{folder}/secret').read())
attempt('write', lambda: write('{folder}/secret', 'r+'))
attempt('create', lambda: write('{folder}/new', 'w'))
attempt('truncate', lambda: os.truncate('{folder}/secret', 0) or 'done')
attempt('open with O_TRUNC', lambda: os.open('{folder}/secret', os.O_RDONLY | os.O_TRUNC))
attempt('link', lambda: os.link('{folder}/secret', 'mine') or 'done')
attempt('rename', lambda: os.rename('{folder}/secret', '{folder}/other') or 'done')
attempt('remove', lambda: os.unlink('{folder}/secret') or 'done')
attempt('chmod', lambda: os.chmod('{folder}/secret', 0) or 'done')
attempt('times', lambda: os.utime('{folder}/secret', (1, 1)) or 'done')
attempt('list', lambda: os.listdir('{folder}'))
attempt('list home', lambda: os.listdir('/home'))
attempt('passwd', lambda: open('/etc/passwd').read())
attempt('environment', lambda: open('/proc/{pid}/environ').read())
attempt('loopback', lambda: socket.create_connection(('127.0.0.1', {port}), timeout=2))
attempt('unix socket', lambda: socket.socket(socket.AF_UNIX).connect('{folder}/socket') or 'done')
attempt('datagram', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})))
attempt('vsock', lambda: socket.socket(40, socket.SOCK_STREAM))
attempt('signal', lambda: os.kill({pid}, 0) or 'done')
attempt('kill', lambda: os.kill(os.getppid(), signal.SIGKILL) or 'done')
attempt('kill all', lambda: libc.kill({pid}, 0))
attempt('priority', lambda: libc.setpriority(0, {pid}, 10))
attempt('limits', lambda: libc.prlimit({pid}, 7, (ctypes.c_ulong * 2)(3, 3), None))
attempt('ptrace', lambda: libc.ptrace(16, {pid}, 0, 0))
attempt('namespace', lambda: libc.unshare(0x10000000))
print('end')
"""


@needs_seccomp
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_a_program_of_an_unprivileged_user_reaches_nothing(level, shared_folder):
    problem = as_nobody(lambda: isolation_problem(level))
    if problem:
        pytest.skip(f"{level}: {problem}")
    server = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(shared_folder / "socket"))
    local.listen()
    (shared_folder / "socket").chmod(0o777)

    def attack():
        program = ATTACK.format(folder=shared_folder, pid=os.getpid(), port=server.getsockname()[1])
        return run_tests(program, [{"stdin": ""}] * 2, LIMITS, level=level)

    outcomes = as_nobody(attack)
    server.close()
    local.close()
    if level == "namespaces":  # the supervisor is process 1 of the program's namespace, which ignores it
        expected = ["kill done\nend\n"]
        assert all(outcome.stdout in (*expected, "end\n") for outcome in outcomes), outcomes
    else:
        assert [outcome.stdout for outcome in outcomes] == ["end\n"] * 2, outcomes
    assert (shared_folder / "secret").read_text() == "hunter2"
    assert sorted(path.name for path in shared_folder.iterdir()) == ["secret", "socket"]


@pytest.mark.skipif(bool(landlock_problem()), reason="no Landlock here")
def test_honest_programs_run_under_landlock():
    program = (
        "import asyncio, json, multiprocessing, os, subprocess, sys, tempfile, threading\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    open(folder + '/a', 'w').write('text')\n    print(open(folder + '/a').read())\n"
        "async def main(): await asyncio.sleep(0.01); return 3\n"
        "print(asyncio.run(main()))\n"
        "done = []\nthread = threading.Thread(target=done.append, args=(1,)); thread.start(); thread.join()\n"
        "read, write = multiprocessing.Pipe()\nwrite.send(done); print(read.recv())\n"
        "pid = os.fork()\nif pid == 0: os._exit(7)\nprint(os.waitpid(pid, 0)[1] >> 8)\n"
        "print(subprocess.run(['/bin/echo', 'hello'], capture_output=True, text=True).stdout)\n"
    )
    outcome = as_nobody(lambda: run_program(program, limits=LIMITS, level="landlock"))
    assert outcome.stdout.split() == ["text", "3", "[1]", "7", "hello"], outcome


@pytest.mark.skipif(bool(landlock_problem()), reason="no Landlock here")
def test_old_landlock_leaves_signals_to_the_filter(monkeypatch):
    patch = "import strop.rewards.sandbox.landlock as l; l.scopes_signals = lambda abi: False; "
    boot = launch._BOOT.replace("sys.path.remove", f"{patch}sys.path.remove")
    monkeypatch.setattr(launch, "_COMMAND", [*launch._COMMAND[:-1], boot])
    program = (
        "import os, signal\n"
        "for target in (os.getppid(), -1):\n"
        "    try: os.kill(target, signal.SIGKILL); print('killed')\n    except PermissionError: print('refused')\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('own signal'))\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
    )
    outcome = as_nobody(lambda: run_program(program, limits=LIMITS, level="landlock"))
    assert outcome.stdout.split("\n") == ["refused", "refused", "own signal", "own signal", ""], outcome


@pytest.mark.skipif(bool(landlock_problem()), reason="no Landlock here")
def test_without_user_namespaces_landlock_is_used():
    level = as_nobody(lambda: choose_isolation().level, refused=["unshare"])
    assert level in ("bubblewrap", "landlock")


@needs_seccomp
def test_without_any_mechanism_programs_are_refused():
    """Also by the scorer and by the tool, before a program exists; and `limits` must be asked for by name."""

    def attempts() -> list[str]:
        actions = [
            choose_isolation,
            lambda: run_program("print(1)"),
            lambda: compute_score("no program", {"inputs": ["1"], "outputs": ["1"]}),
            lambda: PythonTool({}),
            lambda: choose_isolation("landlock"),
        ]
        messages = []
        for action in actions:
            try:
                messages.append(f"ran: {action()}")
            except ValueError as error:
                messages.append(str(error))
        score = compute_score(
            "```python\nprint(1)\n```",
            {"inputs": [""], "outputs": ["1"]},
            sandbox=SandboxFusionConfig(isolation="limits"),
        )
        return [*messages, str(score["score"])]

    *refusals, last, score = as_nobody(attempts, refused=["unshare", LANDLOCK])
    for message in refusals:
        assert "cannot be isolated on this machine" in message, message
        for part in ("namespaces: ", "landlock: ", "CAP_SYS_ADMIN", "isolation=limits"):
            assert part in message
    assert "level 'landlock' does not work on this machine" in last
    assert score == "1.0"


@pytest.mark.skipif(os.geteuid() != 0 or bool(landlock_problem()), reason="needs root and Landlock")
def test_root_runs_programs_as_another_user_under_landlock(tmp_path):
    """Also where other users cannot read the interpreter; it cannot read other files of root."""
    (tmp_path / "secret").write_text("hunter2")
    program = (
        "import os, json, random\nprint(os.getuid() >= 61184)\n"
        f"try: print(open({str(tmp_path / 'secret')!r}).read())\nexcept OSError: print('refused')\n"
        "try: print(open('/etc/shadow').read())\nexcept OSError: print('refused')\n"
        "try: os.setuid(0); print('root')\nexcept OSError: print('refused')\n"
    )
    assert run_program(program, limits=LIMITS, level="landlock").stdout.split() == ["True", *["refused"] * 3]


@needs_seccomp
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_a_program_of_an_unprivileged_user_cannot_read_assertions(level):
    """Program, supervisor and assertions have the same user there."""
    problem = as_nobody(lambda: isolation_problem(level))
    if problem:
        pytest.skip(f"{level}: {problem}")
    tests = [{"assertions": "assert f(1) == 7654321"}, {"assertions": "assert f(2) == 7654321"}]
    outcomes = as_nobody(lambda: run_tests(READ_SELF, tests, LIMITS, level=level))
    assert [outcome.value for outcome in outcomes] == [None, None]
    assert all("AssertionError in line 1" in outcome.stderr for outcome in outcomes), outcomes
