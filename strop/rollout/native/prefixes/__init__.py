"""What the native engine need not compute again: the beginnings of sequences that it has computed before."""
