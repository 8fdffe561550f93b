"""Programs of a model, run where they can do no harm.

    launch.py    starts an interpreter for a program and its tests, and reads what came of them
    inside.py    the trusted part in that interpreter: one process per test, with limits, and nothing left behind
    walls.py     namespaces, mounts, identities: what separates it from the rest of the machine
    isolation.py which of these walls this machine can build

Nothing is imported here: inside.py is loaded by a bare interpreter for every program, and should load nothing else.
"""
