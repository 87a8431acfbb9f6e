"""Features that some models need: experts, recomputation, compiled blocks, exact random numbers, float8."""
