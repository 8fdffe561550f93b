"""A sandbox for programs that a model wrote.

    launch.py         chooses the isolation level, starts an interpreter for a program, and reads the outcomes
    sandbox_child.py  the trusted code in that interpreter: one process per test, with limits and clean-up
    namespaces.py     Linux namespaces, mounts and privileges, which isolate it from the machine
    remote.py         a SandboxFusion server instead of the local sandbox
    limits.py         limits and outcomes

This file imports nothing: a bare interpreter loads sandbox_child.py for every program, and should load
nothing else.
"""
