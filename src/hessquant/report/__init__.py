"""Numbers for people and programs: terminal tables, a progress display, JSON and one HTML page."""
