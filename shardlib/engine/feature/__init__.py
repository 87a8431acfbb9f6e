"""Features that some models need: experts, recomputation, compiled blocks, BatchNorm, exact random numbers, float8."""
