"""`python -m pf2lora`: the command line where the package is not installed."""

from pf2lora.cli import main

main()
