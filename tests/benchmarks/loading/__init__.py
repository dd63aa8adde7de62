"""Contenders of the load benchmark: one module per library, since importing is not what is measured.

Each function takes ``directory`` (a checkpoint), ``files`` (its weight files' paths) and ``sample`` (the name of one
tensor), loads everything into memory that this process owns, and returns `kept.result`. What it made is held until the
clock has stopped.
"""
