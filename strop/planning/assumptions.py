"""Numbers that no configuration says: what libraries and devices take for themselves, and how well they are used.

Each is one constant with its reason. Memory is in bytes, rates are per second.
"""

from __future__ import annotations

GIB = 2**30
MIB = 2**20

# --- memory ----------------------------------------------------------------------------------------------------------------

CONTEXT = int(0.8 * GIB)
"""What the CUDA context and its kernels take outside of torch's allocator: 0.75 to 0.81 GiB measured on an H200."""
SLACK = GIB
"""What torch's allocator keeps of what passes have freed: 0.1 to 1.8 GiB measured on an H200, recorded graphs not counted."""
WORKSPACE = 64 * MIB
"""cuBLAS' workspaces, which torch's allocator counts as its own."""
FRAGMENTATION = 1.1
"""What torch reserves over what passes need at their peak, because freed blocks do not fit what comes next."""
SAFE = 0.97
"""Share of a device's memory that a plan may use; a plan above it is called tight, one above 1 hopeless."""
LOGITS = 2**28
"""Logits that exist at a time on a GPU (models/forward.py), each in float32."""
ENGINE_SAFE = 0.9
"""Share of the free memory that the native engine dares to take for its cache (rollout/native/memory.py)."""
HOST_SHARE = 4
"""On a CPU the cache takes at most this fraction of the host's memory (rollout/native/memory.py)."""
RESTING_SHARE = 4
"""The cache stays while the models learn if with it at most this fraction of the device is taken (rollout/native/memory.py)."""
CACHE_BLOCK = 64
"""Capacities of the cache are multiples of it (rollout/native/scheduler.py)."""
SLEEPING_ENGINE = int(1.5 * GIB)
"""What vLLM keeps on the device while it sleeps: its context and recorded graphs."""
ROW_BYTES = 12
"""Token id and log-prob of each slot of the native engine's cache (rollout/native/rows.py)."""
LOSS_BYTES = 64
"""float32 numbers per response token that the losses keep for the backward pass."""

# --- time ------------------------------------------------------------------------------------------------------------------

PRODUCT_EFFICIENCY = 0.65
"""Share of a device's rate that the matrix products of a training pass reach."""
KEPT_TRAFFIC = 9
"""Times that a pass forward moves what its layers would keep: norms, rotations, gates and sums are operations of their own.
With the share above it gives the update measured on one H200 (0.5B, 16,384 tokens, 0.36 s), and 42% of its rate at 7B."""
LOGIT_TRAFFIC = 5
"""Times that a pass forward moves the logits of its answers."""
PREFILL_EFFICIENCY = 0.45
"""Share of a device's rate that prompts reach in an engine."""
BANDWIDTH = 0.9
"""Share of the memory bandwidth that is reached."""
DECODE_EFFICIENCY = 0.75
"""Share of the peak that matrix products of decode steps reach."""
DECODE_LAUNCH = 45e-6
"""Seconds per layer and decode step that small kernels take, whatever the number of rows. With the two above it gives the
rates measured on one H200 (0.5B 227k, 1.5B 107k, 7B 34.8k tokens per second with 1,024 rows) within 15%."""
SUM_LATENCY = 15e-6
"""Seconds until devices that share matrices have begun to add up what they found, twice per layer."""
ANSWER_SHARE = 0.6
"""Mean length of an answer as a share of the longest that is allowed."""
NODE_LINK = 40e9
"""Bytes per second and device between machines (400 Gbit/s, as collectives see it)."""
HOST_LINK = 25e9
"""Bytes per second between a device and host memory."""
HOST_MEMORY = 20e9
"""Bytes per second of host memory that the optimizer of one rank gets."""
DISK = 2e9
"""Bytes per second that one machine writes to its disk."""
