"""`incv doctor`: from the files of a run directory, how its ranks are; imports no torch, changes nothing."""
