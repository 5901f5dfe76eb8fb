"""Claims: a question, predictions that are committed before the first run, and one line of results per evaluation."""
