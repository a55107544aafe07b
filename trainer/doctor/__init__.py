"""`incv doctor` and `incv env`: diagnose a run from the files of its directory, or examine and describe a machine.

Diagnosing a run needs no torch, so it works on any machine that can access the directory. A machine is examined even
if its torch is broken: only `probes` needs it.
"""
