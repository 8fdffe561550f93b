"""Which layouts of sequences a model computes right."""
