"""What the web servers share: guards of requests, and the base of the pages."""
