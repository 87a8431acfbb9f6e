"""Doors to trainers: Hugging Face Accelerate and transformers. Import the module of the one that you use."""
