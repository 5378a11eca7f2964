"""What every lane and every control log must do, whoever implements it."""

SOON_S = 10.0
"""What must happen at once has happened by then, also when a busy machine stands still for seconds. Whatever a call
would have waited for otherwise takes at least 30 s."""
