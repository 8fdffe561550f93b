"""Training from Python: `strop.grpo(model, train=rows, reward=function)` and its neighbours.

Everything that is given as an object is written into the folder of the run, and the run starts as a command
line that names these files would: the same configuration, preflight, checkpoints and numbers.
"""
