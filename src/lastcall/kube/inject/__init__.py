"""From an object to the JSON patch that protects it: pure functions."""
