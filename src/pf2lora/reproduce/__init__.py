"""The paper's own small experiments, run by the package's methods and engine."""
