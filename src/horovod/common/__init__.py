"""What every front end shares: configuration, the store, wiring, operations, errors."""
