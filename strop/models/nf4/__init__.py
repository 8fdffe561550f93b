"""QLoRA (Dettmers et al. 2023): frozen weights in 4 bits under LoRA adapters. format: what 4 bits mean;
layers: linear layers with such weights; kernel: dequantisation on a GPU."""
