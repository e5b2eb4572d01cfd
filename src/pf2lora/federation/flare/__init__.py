"""Everything that names NVIDIA FLARE."""
