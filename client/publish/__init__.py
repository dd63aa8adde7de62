"""Publishing: a trainer pushes weights to the daemons of a group, and all of their ranks change over, or none does."""
