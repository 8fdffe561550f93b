"""How much memory and time a run takes, before it starts: arithmetic over shapes and settings, without torch or a GPU."""
