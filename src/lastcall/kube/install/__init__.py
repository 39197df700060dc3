"""The objects that install the webhook: YAML, kustomize, Helm."""
