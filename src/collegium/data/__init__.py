"""Files, cases, splits and sites."""
