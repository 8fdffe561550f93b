"""Quantised copies of the weights that the native engine samples from (rollout.quantization): formats (what 8
bits mean, and how they are multiplied), layers (which weights have copies, and when they are made)."""

from strop.rollout.native.quantization.layers import QuantizedLayers

__all__ = ["QuantizedLayers"]
