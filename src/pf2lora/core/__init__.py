"""What a method is, and the mathematics under it. Knows no transformers and no files."""
