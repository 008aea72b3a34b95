"""Random kills and faults of a cache daemon, its engine process and its schedulers: seeded, counted, replayable."""
