"""The benchmark of regret: how far a method falls behind the best one, on the task where it falls behind most."""
