"""Speculative decoding: a pass computes several tokens of a row at once, guesses among them, and keeps what
the model would have sampled anyway.

`propose` guesses the next tokens of a row from repeated tokens, `memory` keeps earlier answers to guess from,
`drafts` holds what a pass needs on the device, `attention` computes guessed tokens as further rows of a
decode step, `verify` keeps those that were sampled, and `controller` decides when this pays.
"""
