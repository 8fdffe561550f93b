"""How a model is trained. Every backend speaks the protocol of base.py."""
