"""Stage verify_environment: what would waste GPU weeks, found before anything is spent."""
