"""Rows of supervised training: SFT, reward models, DPO and KTO."""
