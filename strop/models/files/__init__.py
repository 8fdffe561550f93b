"""Files of models: their weights, and the names of weights in them."""
