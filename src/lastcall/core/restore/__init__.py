"""From a committed checkpoint to live state: what it holds, which bytes are needed, and reading them."""
