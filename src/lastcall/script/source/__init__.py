"""The user's source as syntax trees: files, scopes, conditions, and rewriting them."""
