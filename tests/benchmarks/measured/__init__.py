"""What runs inside measured processes (`fresh.py`) on our side: attaching, touching, reading as one rank."""
