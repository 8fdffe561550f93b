"""The board: a local web page over the files of runs. It reads, and is never imported by training."""
