"""LoRA on a CPU."""
