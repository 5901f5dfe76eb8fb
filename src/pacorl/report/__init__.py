"""One self-contained HTML page per run: verdict, before and after, pair matrices, curves, times, config."""
