"""The figures of a run: computed once as plain data, drawn for the report and for papers."""
