"""The admission webhook as a process: HTTP, TLS, reviews, the annotations of namespaces."""
