"""Parameters, their gradients and the state of optimizers, as they move between the phases of the plan."""
