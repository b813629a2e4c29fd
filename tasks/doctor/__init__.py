"""The doctor: every known silent failure of an EAGLE-3 draft, found in seconds on anyone's files."""
