"""Text that follows a prompt."""
