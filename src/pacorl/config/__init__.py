"""Run configs: sparse YAML over the vetted recipes."""
