"""The command line: one file per group of commands; nothing here imports torch before a command runs."""
