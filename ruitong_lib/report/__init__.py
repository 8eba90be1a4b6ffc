"""Reports: tables and figures of deltas, each beside its floor."""
