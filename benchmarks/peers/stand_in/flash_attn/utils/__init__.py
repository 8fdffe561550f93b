"""Only `distributed`, which OpenRLHF imports for ring attention."""
