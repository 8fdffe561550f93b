"""The training service: many users train and sample LoRA adapters of one model over HTTP."""
