"""Files of models: the names of weights in them."""
