"""Base of all web servers: guards of requests, and pages."""
