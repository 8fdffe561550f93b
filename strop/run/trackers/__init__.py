"""One file per tracker. They are chosen by name, see TRACKERS in the catalogue."""
