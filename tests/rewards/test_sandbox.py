"""The sandbox holds against programs that try to get out, and reports rightly on programs that do not."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from strop.rewards.sandbox import launch
from strop.rewards.sandbox.launch import (
    LEVELS,
    STRONG_LEVELS,
    Isolation,
    choose_isolation,
    isolation_problem,
    run_program,
    run_tests,
)
from strop.rewards.sandbox.limits import ProgramOutcome, SandboxError, SandboxLimits

MARK = f"strop_test_{os.getpid()}"  # in the command line of our sandboxes: other test processes have sandboxes too
HERE = [level for level in LEVELS if not isolation_problem(level)]
WALLED = [level for level in HERE if Isolation(level).hides_files]
SHORT = SandboxLimits(
    seconds=60.0, total_seconds=200.0, memory_mb=256, disk_mb=8, processes=8, output_bytes=100_000
)


@pytest.fixture(params=HERE)
def level(request):
    return request.param


@pytest.fixture(params=WALLED)
def walled(request):
    return request.param


def run(program: str, level: str, stdin: str = "", **limits) -> ProgramOutcome:
    from dataclasses import replace

    return run_program(program, stdin, replace(SHORT, **limits), level=level)


def left_behind() -> list[str]:
    """Processes of sandboxes that are still there, zombies included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_text()
                parent = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if MARK in words or (parent[0] == "Z" and parent[1] == str(os.getpid())):
                found.append(folder.name)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch):
    monkeypatch.setattr(launch, "_COMMAND", [launch._COMMAND[0], "-X", MARK, *launch._COMMAND[1:]])
    before = set(left_behind())  # zombies of other tests
    yield
    deadline = time.monotonic() + 60
    while not set(left_behind()) <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(left_behind()) <= before


# --- what honest programs get -------------------------------------------------------------------------------------------------


def test_a_script_reads_and_writes_in_every_usual_way(level):
    program = (
        "import sys, os\n"
        "a = input(); b = sys.stdin.readline().strip(); c = sys.stdin.buffer.readline().decode().strip()\n"
        "print(a, b, c, sys.stdin.read().split())\n"
        "if __name__ == '__main__':\n    open('note', 'w').write('x'); print(os.listdir('.'), file=sys.stderr)\n    exit()\nprint('not reached')"
    )
    outcome = run(
        program.replace("sys.stdin.buffer.readline().decode()", "sys.stdin.readline()"),
        level,
        "1\n2\nŁ\n4 5\n",
    )
    assert (outcome.status, outcome.stdout, outcome.stderr) == ("ok", "1 2 Ł ['4', '5']\n", "['note']\n")


def test_buffered_and_raw_reading(level):
    assert run("import sys; print(len(sys.stdin.buffer.read()))", level, "é" * 300_000).stdout == "600000\n"
    assert run("print(open(0).read().upper())", level, "abc").stdout == "ABC\n"
    assert run("import os; print(os.read(0, 3))", level, "abcdef").stdout == "b'abc'\n"


def test_errors_are_told_with_their_line(level):
    outcome = run("x = [1]\nprint('before')\nprint(x[3])", level)
    assert outcome.status == "error" and outcome.exit_code == 1 and outcome.stdout == "before\n"
    assert (
        'File "program.py", line 3' in outcome.stderr
        and "print(x[3])" in outcome.stderr
        and "IndexError" in outcome.stderr
    )
    assert "strop" not in outcome.stderr
    assert "SyntaxError" in run("if", level).stderr


@pytest.mark.parametrize(
    ("program", "status", "code"),
    [
        ("import sys; sys.exit(3)", "error", 3),
        ("import sys; sys.exit('no')", "error", 1),
        ("import os; os._exit(0)", "ok", 0),
    ],
)
def test_exit_codes(level, program, status, code):
    outcome = run(program, level)
    assert (outcome.status, outcome.exit_code) == (status, code)


def test_threads_finish_and_exit_functions_run(level):
    program = (
        "import threading, time, atexit\natexit.register(lambda: print('bye'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')"
    )
    assert run(program, level).stdout == "main\nthread\nbye\n"


def test_a_deep_recursion_in_a_thread_with_a_large_stack(level):
    program = (
        "import sys, threading\nsys.setrecursionlimit(10**6); threading.stack_size(1 << 26)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(50000))); t.start(); t.join()"
    )
    assert run(program, level).stdout == "50000\n"


def test_functions_methods_and_assertions(level):
    program = "class Solution:\n    def twice(self, x, times=2): return [x] * times\ndef pair(a, b): return (a, {b})\ndef bad(): raise ValueError('no')\n"
    tests = [
        {"function": "twice", "arguments": ["a"]},
        {"function": "pair", "arguments": [1, 2]},
        {"function": "bad", "arguments": []},
        {"function": "gone", "arguments": []},
        {"assertions": "assert pair(1, 2) == (1, {2})"},
        {"assertions": "assert pair(1, 2) == 3"},
    ]
    outcomes = run_tests(program, tests, SHORT, level=level)
    assert [o.value for o in outcomes] == [["a", "a"], [1, [2]], None, None, True, None]
    assert [o.status for o in outcomes] == ["ok", "ok", "error", "error", "ok", "error"]


def test_leaving_before_the_assertions_is_not_passing_them(level):
    for way in ("import os; os._exit(0)", "raise SystemExit(0)"):
        [outcome] = run_tests(way, [{"assertions": "assert False"}], SHORT, level=level)
        assert outcome.value is None


def test_installed_packages_can_be_imported_or_not():
    outcome = run("import numpy; print(numpy.arange(4).sum())", HERE[0], memory_mb=1024, seconds=20)
    assert outcome.stdout == "6\n", outcome.stderr
    [without] = run_tests("import numpy", [{"stdin": ""}], SHORT, level=HERE[0], packages=False)
    assert "No module named 'numpy'" in without.stderr


def test_the_order_of_sets_does_not_change_from_run_to_run():
    program = "print(list({'a', 'b', 'c', 'd', 'e'}))"
    assert len({run(program, HERE[0]).stdout for _ in range(3)}) == 1


# --- limits --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import signal\nfor s in range(1, 30):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
    ],
)
def test_a_program_without_end(level, program):
    start = time.monotonic()
    outcome = run(program, level, seconds=0.5)
    assert outcome.status == "timeout" and time.monotonic() - start < 60


def test_all_tests_together_have_a_limit(level):
    start = time.monotonic()
    outcomes = run_tests(
        "while True: pass", [{"stdin": ""}] * 20, SandboxLimits(seconds=0.4, total_seconds=1.0), level=level
    )
    assert [o.status for o in outcomes] == ["timeout"] * 20 and time.monotonic() - start < 60


def test_a_memory_bomb(level):
    outcome = run("x = bytearray(10**10)", level)
    assert outcome.status == "error" and "MemoryError" in outcome.stderr
    assert run("x = []\nwhile True: x.append(bytearray(10**6))", level).status == "error"


@pytest.mark.skipif(os.geteuid() == 0 and not WALLED, reason="root's processes are not limited without walls")
def test_memory_of_many_processes_is_added_up(walled):
    program = "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        x = bytearray(b'1' * (100 << 20)); time.sleep(300)\ntime.sleep(300)"
    outcome = run(program, walled)
    assert outcome.status == "memory"


def test_a_flood_of_output(level):
    outcome = run("while True: print('x' * 1000)", level)
    assert outcome.status == "output" and len(outcome.stdout) == 100_000
    assert run("print('x' * 10**6)", level).status == "output"


def test_a_fork_bomb(walled):
    """Also: it is over at once for the machine, because nothing survives the program."""
    program = "import os\nmade = 0\nwhile True:\n    try:\n        if os.fork() == 0:\n            while True:\n                try: os.fork()\n                except OSError: pass\n        made += 1\n    except OSError:\n        break\nprint(made)"
    outcome = run(program, walled, seconds=2)
    assert outcome.status in ("ok", "timeout", "memory")
    if outcome.status == "ok":
        assert int(outcome.stdout) < SHORT.processes


def test_a_thread_bomb(walled):
    program = "import threading, time\nn = 0\ntry:\n    while True:\n        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\nexcept RuntimeError: print(n)"
    outcome = run(program, walled)
    assert outcome.status == "ok" and int(outcome.stdout) < SHORT.processes


def test_a_full_disk_is_empty_for_the_next_test(walled):
    program = (
        "import os\nprint(os.listdir('.'))\nos.makedirs('deep/er')\n"
        "try:\n    for n in range(100): open(f'deep/er/{n}', 'wb').write(bytes(1 << 20))\nexcept OSError as e: print(e.strerror, n)"
    )
    outcomes = run_tests(program, [{"stdin": ""}] * 2, SHORT, level=walled)
    assert [o.stdout.splitlines()[0] for o in outcomes] == ["[]", "[]"]
    assert all("No space left" in o.stdout and int(o.stdout.split()[-1]) <= 8 for o in outcomes)


def test_files_do_not_outlive_a_test(level, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcomes = run_tests(
        "import os; print(os.path.exists('a')); open('a', 'w').close()",
        [{"stdin": ""}] * 2,
        SHORT,
        level=level,
    )
    assert [o.stdout for o in outcomes] == ["False\n", "False\n"]
    assert not list(tmp_path.iterdir())


def test_open_files_and_file_size_are_limited(level):
    assert "Too many open files" in run("x = [open('/dev/null') for _ in range(500)]", level).stderr
    outcome = run(
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nopen('a', 'wb').write(bytes(20 << 20))",
        level,
    )
    assert outcome.status == "error"


# --- escapes -------------------------------------------------------------------------------------------------------------------


def test_children_that_hide_are_found(level):
    """In a session of their own, orphaned, deaf to signals."""
    program = (
        "import os, signal, time\n"
        "for _ in range(2):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork(): os._exit(0)\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN); os.closerange(0, 50); time.sleep(1000)\n"
        "time.sleep(0.2); print('done')"
    )
    start = time.monotonic()
    assert run(program, level).stdout == "done\n"
    assert time.monotonic() - start < 100  # and nothing_is_left_behind looks for them


def test_the_network_is_cut(walled):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    program = (
        "import socket\n"
        f"for host, port in (('127.0.0.1', {port}), ('8.8.8.8', 53)):\n"
        "    try:\n        socket.create_connection((host, port), timeout=2); print('connected')\n    except OSError as e: print('refused')\n"
        "try: print(socket.if_nameindex())\nexcept OSError: print('none')"
    )
    outcome = run(program, walled)
    assert outcome.stdout.splitlines()[:2] == ["refused", "refused"]
    server.close()


def test_the_environment_and_other_processes_are_out_of_sight(walled, monkeypatch):
    monkeypatch.setenv("STROP_TEST_SECRET", "hunter2")
    program = (
        "import os, glob\nprint(sorted(os.environ))\n"
        "for path in glob.glob('/proc/[0-9]*'):\n"
        "    for name in ('environ', 'cmdline', 'maps', 'mem'):\n"
        "        try: print(path, name, open(f'{path}/{name}', 'rb').read(100000)[:100])\n        except OSError: pass\n"
        "print('pids', len(glob.glob('/proc/[0-9]*')))"
    )
    outcome = run(program, walled)
    assert (
        "hunter2" not in outcome.stdout
        and "STROP_TEST_SECRET" not in outcome.stdout
        and "pytest" not in outcome.stdout
    )
    assert "pids 2" in outcome.stdout or "pids 0" in outcome.stdout


def test_files_of_the_machine_cannot_be_read_or_written(walled, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    program = (
        "import os\n"
        f"for path in ({str(secret)!r}, '/etc/passwd', '/etc/shadow', os.path.expanduser('~root/.ssh')):\n"
        "    try: print('read', path, open(path).read())\n    except OSError: pass\n"
        f"for path in ({str(tmp_path / 'new')!r}, '/usr/new', '/new', os.__file__, '/dev/new', '/proc/sys/kernel/hostname'):\n"
        "    try: open(path, 'w').close(); print('wrote', path)\n    except OSError: pass\n"
        "try: os.makedirs('/root/x'); print('made')\nexcept OSError: pass"
    )
    assert run(program, walled).stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_killing_the_supervisor_and_everybody(level):
    program = (
        "import os, signal\nfor pid in (os.getppid(), 1):\n    for s in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):\n"
        "        try: os.kill(pid, s)\n        except OSError: pass\nprint('still here')"
    )
    if not Isolation(level).protects_processes:
        pytest.skip("this level says that processes of the same user can be harmed")
    outcomes = run_tests(program + "\nos.kill(-1, signal.SIGKILL)", [{"stdin": ""}] * 2, SHORT, level=level)
    assert [o.stdout for o in outcomes] == ["still here\n"] * 2 or [o.exit_code for o in outcomes] == [-9, -9]
    assert run("print(1)", level).stdout == "1\n"


def test_privileged_calls_are_refused(walled):
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nresults = []\n"
        "results.append(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))\n"
        "results.append(libc.unshare(0x10000000))\nresults.append(libc.unshare(0x20000))\n"
        "results.append(libc.chroot(b'/tmp'))\nresults.append(libc.sethostname(b'x', 1))\n"
        "results.append(libc.ptrace(16, os.getppid(), 0, 0))\n"
        "try: os.setuid(0); results.append(os.getuid() == 0 and os.geteuid() == 0 and 'root')\nexcept OSError: results.append(-1)\n"
        "try: os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0)); results.append(0)\nexcept OSError: results.append(-1)\n"
        "print(results)"
    )
    outcome = run(program, walled)
    *calls, user, device = eval(outcome.stdout)
    assert set(calls) == {-1} and device == -1, outcome.stdout
    assert user == -1 or os.geteuid() != 0


def test_a_crash_in_native_code_is_reported(level):
    outcome = run("import ctypes; ctypes.string_at(0)", level)
    assert outcome.status == "error" and outcome.exit_code == -11


def test_closing_everything_harms_nobody(level):
    outcomes = run_tests("import os; os.closerange(0, 100)", [{"stdin": ""}] * 2, SHORT, level=level)
    assert [o.status for o in outcomes] == ["ok", "ok"]


def test_a_false_value_cannot_pretend_to_be_anything(level):
    """A result travels as JSON: an object that equals everything does not get out."""
    program = "class Yes:\n    def __eq__(self, other): return True\ndef f(): return Yes()"
    [outcome] = run_tests(program, [{"function": "f", "arguments": []}], SHORT, level=level)
    assert outcome.value is None and outcome.status == "error"


# --- the machine ---------------------------------------------------------------------------------------------------------------


def test_the_level_is_stated():
    if HERE[0] not in STRONG_LEVELS:
        with pytest.raises(ValueError, match="cannot be isolated"):
            choose_isolation()
        return
    found = choose_isolation()
    assert found.level == HERE[0]
    assert ("no network" in str(found)) == found.cuts_network
    assert "network is OPEN" in str(Isolation("limits")) and "WRITABLE" in str(Isolation("limits"))
    with pytest.raises(ValueError, match="Unknown isolation 'namespace'"):
        choose_isolation("namespace")
    for other in LEVELS:
        if other not in HERE:
            with pytest.raises(ValueError, match=f"level '{other}' does not work on this machine"):
                choose_isolation(other)


def test_a_broken_sandbox_is_an_error_not_a_result(monkeypatch):
    monkeypatch.setattr(launch, "_COMMAND", ["/bin/false"])
    with pytest.raises(SandboxError, match="no report"):
        run_program("print(1)", level=HERE[0])
    monkeypatch.setattr(launch, "_COMMAND", ["/bin/sleep", "100"])
    monkeypatch.setattr(launch, "GRACE", 0.2)
    with pytest.raises(SandboxError, match="did not end within"):
        run_program("print(1)", limits=SandboxLimits(seconds=0.1, total_seconds=0.2), level=HERE[0])


def test_many_programs_at_once():
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(run(f"print({n})", HERE[0]).stdout))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, results)) == list(range(12))


@pytest.mark.skipif(shutil.which("bwrap") is None or os.geteuid() == 0, reason="bubblewrap is not for us")
def test_bubblewrap_works_where_it_is_installed():
    assert "bubblewrap" in HERE, isolation_problem("bubblewrap")
