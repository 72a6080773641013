"""What python -m dsv4cp runs: doctor, demo, bench."""
