"""A sandbox for programs that a model wrote.

    launch.py         chooses the isolation level, starts an interpreter for a program, and reads the outcomes
    sandbox_child.py  the trusted code in that interpreter: one process per test, with limits and clean-up
    program.py        the process of a program
    calls.py          that process answers calls of assertions
    checker.py        the process of the assertions, which the program cannot reach
    watch.py          output, time, memory and files of the processes
    work_folder.py    the folder of a program
    namespaces.py     Linux namespaces, mounts and privileges, which isolate it from the machine
    landlock.py       the same for files, network and signals without any privileges
    seccomp.py        system calls that no program may make
    cgroup.py         the memory limit of all processes together
    remote.py         a SandboxFusion server instead of the local sandbox
    limits.py         limits and outcomes

This file imports nothing: a bare interpreter loads sandbox_child.py for every program, and should load
little else.
"""

HEADER = 16
"""Bytes at the beginning of a request that hold the length of its JSON text, as decimal digits."""
