"""A discrete-event model of a fleet: what its queues do with measured costs. See docs/scale.md."""
