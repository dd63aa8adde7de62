"""Chaos: real supervisors, keepers, workers and engines under random faults, with invariants checked after each.

    python -m tests.faults.chaos --seconds 1800 --seed 7

`world.py` starts and ends the processes: two places by themselves, and a group of two ranks whose weights are changed
all the time, with engines that follow. `faults*.py` strike, `invariants.py` judges, `runner.py` decides what is next
under a seed, `report.py` says what was survived. `planted.py` is a keeper with a bug, to see that it is found.
"""
