"""Where our default deliberately gives another number than a peer. Each is still reproduced through the named switch.

(pattern of the peer's function, tag of the case or "" for all) -> (switch that reproduces it, why our default differs)
"""

DIFFERENCES: dict[tuple[str, str], tuple[str, str]] = {}
