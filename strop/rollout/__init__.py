"""How tokens are sampled. Every engine speaks the protocol of base.py."""
