"""How a model is sampled by default: its generation_config.json."""
