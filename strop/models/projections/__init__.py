"""Linear layers on a GPU. fused: several layers with the same input as one product; divided: products whose
bits do not depend on the number of rows."""
