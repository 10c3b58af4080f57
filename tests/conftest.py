"""What all tests have: worlds of ranks."""

pytest_plugins = ["worlds"]
