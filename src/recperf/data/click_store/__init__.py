"""Click rows as memory-mapped arrays with named columns: Criteo's converted logs and a user's own imported clicks."""
