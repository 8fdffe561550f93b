"""What was asked. Nothing here imports torch, so that `strop --help` and the first half of `strop check` feel
instant."""
