"""What compiled functions for CPUs share: the call of the compiler, and vectors and tiles in C."""
