"""The task world: Signal Temporal Logic over rectangles, exact in continuous time. Pure numpy; no torch."""
