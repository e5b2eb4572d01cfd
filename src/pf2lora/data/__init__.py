"""Where rows come from, how they are shared out among clients, and how batches are drawn from them."""
