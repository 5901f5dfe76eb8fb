"""What the project's web pages share."""
