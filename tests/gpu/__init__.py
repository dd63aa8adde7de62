"""What only a GPU can show. ``probe.py`` asks the one question that everything rests on; ``check.py`` asks the rest."""
